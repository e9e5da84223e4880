"""What all tests share does what it says."""

from __future__ import annotations

import gc

import torch


def test_what_was_imported_is_left_out_of_collections() -> None:
    assert all(found is not vars(torch) for found in gc.get_objects())
