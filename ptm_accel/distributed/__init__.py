"""Several processes: what they must have in common."""
