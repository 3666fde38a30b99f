"""Daemons that the client starts when none are configured, shared by the ranks of a host."""
