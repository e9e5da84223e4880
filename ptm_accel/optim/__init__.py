"""Optimizers over paged parameters and state."""
