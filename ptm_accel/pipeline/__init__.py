"""Sequences in slices of tokens (TeraPipe, arXiv 2102.07988): a causal model's token needs those before it alone."""
