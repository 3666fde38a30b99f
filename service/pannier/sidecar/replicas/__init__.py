"""Replicas: the files of a rank in the spool of a second host, which uploads them if the first one is lost."""
