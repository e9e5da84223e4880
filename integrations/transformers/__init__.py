"""Adapter for transformers."""
