"""Hosts, links and whoever else is on the network."""
