"""Data files between their hand-over and their upload, and the journal about them."""
