"""Takes a training job's checkpoints off its hands: what runs inside the trainer."""
