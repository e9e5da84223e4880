"""What happens at an access of a running model: the pending update, the plan of the pass, the block."""
