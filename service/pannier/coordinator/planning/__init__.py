"""From the local plans of all ranks to the global plan."""
