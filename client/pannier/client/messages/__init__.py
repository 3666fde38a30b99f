"""Human-readable output of the client: log lines on stderr, a line per save and load, short tracebacks."""
