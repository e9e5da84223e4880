"""A made-up machine, and its numbers."""

from __future__ import annotations

from ptm_accel.hardware.profile import DeviceRates, Fingerprint, HardwareProfile, LinkRates

HERE = Fingerprint(cpu="Abacus 9", cores=4, memory_gib=16, kernel="6.0", torch="2.13.0", gpus="Card X", driver="550")
DISK = LinkRates(4e9, 8e9, 6e9)
LINK = LinkRates(50e9, 48e9, 80e9)
CARD = DeviceRates(LINK, LinkRates(5e9, 4e9, 4.5e9), 9e10)
PROFILE = HardwareProfile(
    fingerprint=HERE,
    disks={"254:0 ext4 /dev/vda": DISK},
    devices={"Card X": CARD, "Card Y": DeviceRates(None, LINK, 1e10)},
    cpu_update_params_s={1: 2e9, 2: 3.9e9},
)
