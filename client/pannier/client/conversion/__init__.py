"""Checkpoints in the files of other programs, made outside training."""
