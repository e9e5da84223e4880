"""A made-up machine, and its numbers."""

from __future__ import annotations

from ptm_accel.hardware.cache import Fingerprint
from ptm_accel.hardware.profile import DeviceRates, LinkRates

HERE: Fingerprint = {"cpu": "Abacus 9", "cores": 4, "memory_gib": 16, "torch": "2.13.0", "gpus": "Card X"}
DISK = LinkRates(4e9, 8e9, 6e9)
LINK = LinkRates(50e9, 48e9, 80e9)
CARD = DeviceRates(50e9, 48e9, 80e9, 9e10)
