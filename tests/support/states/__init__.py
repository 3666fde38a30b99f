"""State dicts of all kinds, and comparing them."""
