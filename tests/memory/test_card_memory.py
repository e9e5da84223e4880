"""A card's memory: blocks out of slabs and small ones beside them, and what others have reserved."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.card_memory import SMALL_BYTES, CardMemory, TorchAllocator, _DeviceSlice
from ptm_accel.memory.slabs import Run
from ptm_accel.memory.transfer import Buffer
from ptm_accel.units import GIB, MIB
from tests.card import Card, CardAllocator, OnCard


@pytest.fixture
def card() -> Card:
    return Card(GIB)


@pytest.fixture
def memory(card: Card) -> Iterator[CardMemory]:
    memory = CardMemory(CardAllocator(card))
    yield memory
    memory.check_integrity()


def give_back(memory: CardMemory, buffer: Buffer) -> None:
    buffer.octets = None
    memory.recycle(buffer)


# ---- what the tests believe of torch's allocator ---------------------------------------------------------------------


def test_sizes_and_segments_are_those_of_torchs_allocator(card: Card) -> None:
    for nbytes, allocated, reserved in (
        (1, 512, 2 * MIB),
        (MIB, MIB + 512, 2 * MIB),
        (MIB + 1, 2 * MIB + 1024, 22 * MIB),
        (9 * MIB, 11 * MIB + 1024, 22 * MIB),
        (11 * MIB, 23 * MIB + 1024, 34 * MIB),
    ):
        card.malloc(nbytes)
        assert (card.allocated, card.reserved) == (allocated, reserved)


def test_a_segment_is_given_back_only_when_nothing_is_left_in_it(card: Card) -> None:
    pieces = [card.malloc(100 * MIB) for _ in range(10)]
    for piece in pieces:
        card.free(piece)
    assert (card.allocated, card.reserved) == (0, 1000 * MIB)
    kept = [card.malloc(60 * MIB) for _ in range(10)]
    assert card.reserved == 1000 * MIB, "each is cut from a free segment"
    with pytest.raises(torch.OutOfMemoryError, match=r"of 1048576000 B that are reserved"):
        card.malloc(50 * MIB)
    assert (card.allocated, card.flushes) == (600 * MIB, 1)
    card.free(kept.pop())
    card.malloc(110 * MIB)
    assert card.reserved == (900 + 110) * MIB


def test_what_operations_allocate_lives_as_long_as_its_last_tensor(card: Card) -> None:
    with OnCard(card, {"mul": 5 * MIB}):
        ones = torch.ones(3 * MIB, dtype=torch.uint8)
        view = ones[5:]
        assert card.allocated == 3 * MIB
        del ones
        assert card.allocated == 3 * MIB
        view.add_(1)
        assert card.peak_allocated == 3 * MIB
        twice = view * 2
        assert card.peak_allocated == 3 * MIB + 8 * MIB
        del view
        assert card.allocated == twice.numel() + -twice.numel() % 512
    del twice
    assert card.allocated == 0


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_share_slabs_and_small_ones_do_not(card: Card, memory: CardMemory) -> None:
    blocks = [memory.allocate(nbytes) for nbytes in (3 * MIB, 4 * MIB, 4096, MIB)]
    assert [memory.cuts(buffer.nbytes) for buffer in blocks] == [True, True, False, False]
    assert [isinstance(buffer.region, Run) for buffer in blocks] == [True, True, False, False]
    assert (memory.live_bytes, memory.held_bytes) == (8 * MIB + 4096, 65 * MIB + 4096)
    assert card.reserved == 66 * MIB
    for number, buffer in enumerate(blocks):
        assert buffer.octets is not None
        assert buffer.octets.numel() == buffer.nbytes == buffer.octets.untyped_storage().nbytes(), (
            "a storage of its own"
        )
        buffer.octets.fill_(number)
    for number, buffer in enumerate(blocks):
        assert buffer.octets is not None
        assert (buffer.octets == number).all()
    for buffer in blocks:
        give_back(memory, buffer)
    assert (memory.live_bytes, memory.held_bytes) == (0, 64 * MIB)
    assert memory._allocator.given_up == [4096, MIB], "other streams may still use them"  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="recycled twice"):
        memory.recycle(blocks[0])
    memory.confine(0)
    assert (memory.held_bytes, card.allocated) == (0, 0)


def test_what_is_confined_refuses_and_gives_only_as_a_last_resort(card: Card, memory: CardMemory) -> None:
    memory.confine(10 * MIB)
    buffer = memory.allocate(6 * MIB)
    with pytest.raises(DeviceBudgetError, match=r"cannot allocate a block of 6.00 MiB"):
        memory.allocate(6 * MIB)
    more = memory.allocate(6 * MIB, anywhere=True)
    assert memory.held_bytes == 16 * MIB
    give_back(memory, more)
    give_back(memory, buffer)
    with pytest.raises(DeviceBudgetError, match=r"cannot allocate a block of 2.00 GiB"):
        memory.allocate(2 * GIB, anywhere=True)


def test_a_card_without_room_for_a_small_block(card: Card, memory: CardMemory) -> None:
    everything = card.malloc(GIB)
    with pytest.raises(DeviceBudgetError, match=r"cannot allocate a block of 4096 B"):
        memory.allocate(4096)
    card.free(everything)


def test_what_is_beside_pages_is_what_is_reserved_and_no_pages_hold(card: Card, memory: CardMemory) -> None:
    other = CardMemory(CardAllocator(card))
    elsewhere = CardMemory(CardAllocator(Card(GIB)))
    blocks = [each.allocate(3 * MIB) for each in (memory, other, elsewhere)]
    small = memory.allocate(4096)
    assert memory.beside_bytes() == other.beside_bytes() == 2 * MIB - 4096
    activations = card.malloc(30 * MIB)
    assert memory.beside_bytes() == 32 * MIB - 4096
    card.free(activations)
    assert memory.beside_bytes() == 32 * MIB - 4096, "kept for what comes next"
    memory.trim()
    assert memory.beside_bytes() == 2 * MIB - 4096
    for each, buffer in zip((memory, other, elsewhere, memory), (*blocks, small), strict=True):
        give_back(each, buffer)


def test_integrity_names_what_is_held_and_reserved(card: Card, memory: CardMemory) -> None:
    buffer = memory.allocate(3 * MIB)
    reserved, card.reserved = card.reserved, MIB
    with pytest.raises(AssertionError, match=r"67108864 B are held, 1048576 B are reserved"):
        memory.check_integrity()
    card.reserved = reserved
    give_back(memory, buffer)
    memory.close()
    assert memory.held_bytes == 0


# ---- torch's allocator -----------------------------------------------------------------------------------------------


class Stream:
    """Stands in for a CUDA stream, and takes note of what it was told."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Memory:
    """Stands in for a tensor on a card."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.recorded: list[Stream] = []

    def data_ptr(self) -> int:
        return self.address

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream)


def test_a_part_of_a_tensor_says_where_it_lies_and_keeps_the_tensor() -> None:
    memory: Any = Memory(0x10000)
    part = _DeviceSlice(memory, 4096, 8192)
    assert part.__cuda_array_interface__ == {
        "shape": (8192,),
        "typestr": "|u1",
        "data": (0x11000, False),
        "version": 2,
    }
    assert part._memory is memory


def test_parts_are_given_in_the_order_of_all_streams_that_have_used_some(monkeypatch: pytest.MonkeyPatch) -> None:
    device, streams = torch.device("cuda", 0), [Stream(), Stream()]
    current = [streams[0]]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch, "as_tensor", lambda part, device: part)
    allocator, memory = TorchAllocator(device), Memory(0)
    view: Any = allocator.view
    view(memory, 0, 1)
    view(memory, 0, 1)
    assert not streams[0].waited, "one stream is in order by itself"
    current[0] = streams[1]
    view(memory, 0, 1)
    assert (streams[0].waited, streams[1].waited) == ([], [streams[0]])
    allocator.give_up(memory)  # type: ignore[arg-type]
    assert set(memory.recorded) == set(streams)


def test_what_torch_has_not_is_none_and_what_it_has_reserved_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    allocator = TorchAllocator(torch.device("cuda", 0))
    stats = {"reserved_bytes": {"all": {"current": 7, "peak": 9}}}
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=5 * GIB))
    assert allocator.empty(SMALL_BYTES) is None
    assert allocator.reserved() == 7
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 5 * GIB))
    assert allocator.free() == 2 * GIB
    text = r"cuda:0: cannot allocate a block of 1.00 MiB: 3.00 GiB are allocated and 4.00 GiB reserved by torch"
    assert allocator.refusal(MIB).args[0].startswith("ptm_accel: the device is out of memory. cuda:0")
    with pytest.raises(DeviceBudgetError, match=text):
        raise allocator.refusal(MIB)
