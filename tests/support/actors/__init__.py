"""Clients, ranks, sidecars and coordinators played by a test."""
