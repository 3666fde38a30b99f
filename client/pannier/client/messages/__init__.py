"""What the client says to people: log lines on stderr, the line of a save, where errors end."""
