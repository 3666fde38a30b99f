"""Sidecars for the pods of several jobs of a node: a process for each, supervised."""
