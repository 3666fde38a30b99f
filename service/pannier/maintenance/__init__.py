"""What is done to checkpoints after their commit, or instead of it: all without torch."""
