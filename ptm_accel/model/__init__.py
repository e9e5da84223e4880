"""How unchanged model code meets pages: faults, saved tensors, gradients."""
