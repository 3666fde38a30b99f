"""What this host has for loads: local copies of committed checkpoints in its spool, and fetched blocks."""
