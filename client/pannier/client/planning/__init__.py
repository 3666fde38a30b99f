"""From a state dict to the plan of a save, without a call where a cached plan fits."""
