"""From tensors to host memory: the one copy that a save costs the training loop."""
