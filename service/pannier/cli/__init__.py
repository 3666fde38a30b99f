"""The ``pannier`` command: one module per subcommand, none of which imports torch."""
