"""Scratch files that give back other bytes than were written (`disk.verify`)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel import Engine, PTMConfig
from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import GRAIN_BYTES, DiskTier, bounce_bytes
from ptm_accel.memory.frames import FramePool
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.mapping import anonymous_run, view_at
from ptm_accel.memory.scratch import Io
from tests.mock_device import MockDevice

UNIT = 4 * GRAIN_BYTES
NBYTES = 3 * UNIT + GRAIN_BYTES


class Flips:
    """Reads that turn one bit over, in what lies at `at` of the file, `left` times."""

    def __init__(self) -> None:
        self.at = 0
        self.left = 0

    def io(self) -> Io:
        return Io(preadv=self._read)

    def _read(self, fd: int, views: list[memoryview], offset: int) -> int:
        taken = os.preadv(fd, views, offset)
        if self.left and offset <= self.at < offset + taken:
            self.left -= 1
            views[0][self.at - offset] ^= 16
        return taken


@pytest.fixture
def flips() -> Flips:
    return Flips()


@pytest.fixture
def tier(tmp_path: Path, flips: Flips) -> Iterator[DiskTier]:
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 1 << 24), block_bytes=UNIT, io=flips.io(), verifies=True)
    yield tier
    tier.check_integrity()
    tier.close()


def random_bytes(nbytes: int = NBYTES, shift: int = 0) -> torch.Tensor:
    return anonymous_run(nbytes + shift, "a test").tensor()[shift:].random_(0, 256)


def overwrite(tier: DiskTier, slot: object, at: int) -> None:
    """Turns one bit over in the file itself."""
    (file,) = tier._files
    run = anonymous_run(GRAIN_BYTES, "a test")
    begin = slot.segments[0].offset + at // GRAIN_BYTES * GRAIN_BYTES  # type: ignore[attr-defined]
    os.preadv(file.fd, [view_at(run.address, GRAIN_BYTES)], begin)
    run.tensor()[at % GRAIN_BYTES] ^= 1
    os.pwritev(file.fd, [view_at(run.address, GRAIN_BYTES)], begin)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("at", [0, UNIT - 1, 2 * UNIT + 5, NBYTES - 1])
def test_a_bit_that_is_read_wrong_once_is_read_again(
    tier: DiskTier, flips: Flips, caplog: pytest.LogCaptureFixture, at: int, shift: int
) -> None:
    data, back = random_bytes(shift=shift), random_bytes(shift=shift)
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    tier.store(slot, 0, data).wait()
    flips.at, flips.left = slot.segments[0].offset + at, 1
    tier.load(slot, 0, back).wait()
    assert torch.equal(back, data)
    assert "tried once more: [Errno 5] the bytes read are not those written, CRC-32" in caplog.text


@pytest.mark.parametrize("at", [0, UNIT + 7, NBYTES - 1])
def test_a_bit_that_is_wrong_in_the_file_ends_in_an_error(tier: DiskTier, tmp_path: Path, at: int) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "layers.0.weight")
    tier.store(slot, 0, random_bytes()).wait()
    overwrite(tier, slot, at)
    place = slot.segments[0].offset + at // UNIT * UNIT
    text = (
        rf"read of layers\.0\.weight failed: .* at offset {place} of the scratch file in {re.escape(str(tmp_path))}: "
    )
    for _ in range(2):
        with pytest.raises(DiskError, match=text + r"the bytes read are not those written, CRC-32 \w{8} and \w{8}"):
            tier.load(slot, 0, random_bytes()).wait()


def test_a_part_is_compared_with_all_of_its_page(tier: DiskTier) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    tier.store(slot, 0, random_bytes()).wait()
    overwrite(tier, slot, UNIT + 9)
    tier.load(slot, 3, random_bytes(UNIT - 3)).wait()
    tier.load(slot, 2 * UNIT, random_bytes(UNIT)).wait()
    with pytest.raises(DiskError, match="not those written"):
        tier.load(slot, 2 * UNIT - 1, random_bytes(5)).wait()


def test_a_part_is_not_written_over_a_page_that_is_wrong(tier: DiskTier) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    tier.store(slot, 0, random_bytes()).wait()
    overwrite(tier, slot, 9)
    with pytest.raises(DiskError, match="write of w failed: .* not those written"):
        tier.store(slot, UNIT - 1, random_bytes(5)).wait()


def test_parts_and_pages_that_were_never_written(tier: DiskTier) -> None:
    slot, data = tier.new(NBYTES, Tag.PARAM, "w"), random_bytes(UNIT + 11)
    tier.load(slot, 0, random_bytes()).wait()
    tier.store(slot, 5, data).wait()
    back = torch.empty_like(data)
    tier.load(slot, 5, back).wait()
    assert torch.equal(back, data)
    tier.load(slot, 0, random_bytes()).wait()


def test_room_that_is_used_again_has_no_checksums_of_before(tier: DiskTier) -> None:
    first = tier.new(NBYTES, Tag.PARAM, "first")
    tier.store(first, 0, random_bytes()).wait()
    tier.free(first)
    other = tier.new(GRAIN_BYTES, Tag.PARAM, "other")
    tier.store(other, 0, random_bytes(GRAIN_BYTES)).wait()
    tier.free(other)
    again = tier.new(NBYTES, Tag.PARAM, "again")
    tier.load(again, 0, random_bytes()).wait()


def test_a_snapshot_is_compared(tier: DiskTier, tmp_path: Path) -> None:
    data, slot = random_bytes(), tier.new(NBYTES, Tag.PARAM, "w")
    tier.store(slot, 0, data).wait()
    assert torch.equal(tier.snapshot(slot), data)
    overwrite(tier, slot, UNIT)
    with pytest.raises(DiskError, match=rf"snapshot of w failed: .* at offset {slot.segments[0].offset + UNIT} .* not"):
        tier.snapshot(slot)
    with pytest.raises(DiskError, match="snapshot of w failed"):
        tier.copy(slot, tier.new(NBYTES, Tag.PARAM, "copy"))


@pytest.mark.filterwarnings("ignore:ptm_accel. the disk path")
def test_bounce_buffers_of_files_that_are_not_direct_are_charged() -> None:
    host = Budget(Tier.HOST, 1 << 24)
    shm = Path("/dev/shm")
    tier = DiskTier([shm], Budget(Tier.DISK, 1 << 24), block_bytes=UNIT, staging=host, verifies=True)
    assert host.used_bytes == bounce_bytes(1, UNIT)
    tier.close()
    assert host.used_bytes == 0


def test_pages_that_overflow_from_host_memory(tmp_path: Path, flips: Flips) -> None:
    disk = DiskTier([tmp_path], Budget(Tier.DISK, 1 << 24), block_bytes=UNIT, io=flips.io(), verifies=True)
    device, frames = MockDevice(), FramePool(Budget(Tier.HOST, 4 * UNIT), UNIT)
    backing = HostStore(device, frames, disk)
    handles, values = [], [random_bytes(2 * UNIT) for _ in range(4)]
    for index, data in enumerate(values):
        handles.append(backing.new(2 * UNIT, Tag.PARAM, f"w{index}"))
        backing.store(handles[-1], 0, data).wait()
    for handle, data in zip(handles, values, strict=True):
        into = torch.empty_like(data)
        backing.load(handle, 0, into).wait()
        assert torch.equal(into, data)
    (at,) = [page.slot.segments[0].offset for page in handles[0].pages[:1]]
    flips.at, flips.left = at, 2
    with pytest.raises(DiskError, match="read of w0 failed: .* not those written"):
        backing.load(handles[0], 0, torch.empty_like(values[0])).wait()
    backing.close()
    device.close()
    frames.close()
    disk.close()


def losses(step: Callable[[int], torch.Tensor], steps: int = 3) -> list[float]:
    return [step(index).item() for index in range(steps)]


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4, vocab_size=512
    )
    return LlamaForCausalLM(shape)


@pytest.mark.parametrize("damage", [False, True])
def test_training_on_pages_has_the_bits_of_plain_or_ends(tmp_path: Path, damage: bool) -> None:
    rows = torch.randint(0, 512, (3, 2, 16), generator=torch.Generator().manual_seed(1))
    plain = small_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)

    def plain_step(index: int) -> torch.Tensor:
        loss = plain(input_ids=rows[index], labels=rows[index]).loss
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        return loss

    expected = losses(plain_step)
    model = small_model()
    disk = {"paths": str(tmp_path), "verify": True}
    engine = Engine.attach(model, PTMConfig(host_memory="1MiB", disk=disk, page_size="16KiB"))
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step(index: int) -> torch.Tensor:
        if damage and index == 2:
            tier = engine.memory.disk
            for slot in [slot for slot in tier._live if slot.sums]:
                tier._lanes.wait_until(lambda slot=slot: not slot.running, "a test")
                overwrite(tier, slot, 5)
        loss = model(input_ids=rows[index], labels=rows[index]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    try:
        if damage:
            with pytest.raises(DiskError, match="not those written"):
                losses(step)
        else:
            assert losses(step) == expected
            for name, value in model.state_dict().items():
                assert torch.equal(value, plain.state_dict()[name]), name
    finally:
        engine.close()
