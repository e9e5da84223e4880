"""Adapter for accelerate."""
