"""Adapter for accelerate: an `Accelerator` that puts models on pages."""

from __future__ import annotations

from .accelerator import PagedAcceleratedOptimizer, PagedGradScaler, PTMAccelerator

__all__ = ["PTMAccelerator", "PagedAcceleratedOptimizer", "PagedGradScaler"]
