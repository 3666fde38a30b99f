"""Saves that an earlier start of the job left ingested, finished before a load looks for the newest checkpoint."""
