"""From staged files to the sidecar, and status back."""
