"""Object stores on this machine, with faults."""
