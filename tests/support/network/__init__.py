"""Hosts, links and other peers on the network."""
