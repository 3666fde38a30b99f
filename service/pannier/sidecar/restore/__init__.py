"""What this host's spool has of committed checkpoints, for loads."""
