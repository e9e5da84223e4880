"""Ways to train that change what is computed, beside pages, which do not."""
