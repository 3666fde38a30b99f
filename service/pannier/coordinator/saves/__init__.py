"""The saves under way: states, participants, failures, and what runs each of them."""
