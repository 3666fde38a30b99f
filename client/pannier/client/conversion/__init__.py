"""Exports of checkpoints to the file formats of other programs, made outside training."""
