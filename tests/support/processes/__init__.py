"""Real processes: daemons, ranks, commands, and what they run on."""
