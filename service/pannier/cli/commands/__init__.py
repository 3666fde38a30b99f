"""One module per subcommand, named after it."""
