"""What happens at the accesses of a running model: pending updates, the plan of the pass, the blocks."""
