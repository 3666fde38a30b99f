"""What client and services share besides the wire: timeouts, retries, traces, locations, human-readable texts."""
