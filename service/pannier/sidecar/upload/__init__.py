"""From the spool to storage."""
