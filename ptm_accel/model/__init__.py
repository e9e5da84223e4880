"""Unchanged model code on pages: faults, saved tensors, gradients."""
