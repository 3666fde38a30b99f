"""Daemons that the client starts where none is configured, shared by the ranks of a host."""
