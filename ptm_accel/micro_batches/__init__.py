"""Micro-batches by layer: all micro-batches of a step go through a layer before the next one begins."""
