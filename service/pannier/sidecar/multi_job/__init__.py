"""One sidecar for the pods of several jobs of a node."""
