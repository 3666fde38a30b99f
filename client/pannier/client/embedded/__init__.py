"""Daemons that nobody configured: started by the client, shared by the ranks of a host."""
