"""Running loads and those that have ended, as ranks report them."""
