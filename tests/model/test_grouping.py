"""Which parameters are moved together, and where they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.windows import Windows
from ptm_accel.model.floor import ANY_OPTIMIZER
from ptm_accel.model.grouping import MOST_GROUP_BYTES, group_sizes, groups_of
from ptm_accel.model.groups import ParamGroup
from ptm_accel.opening import open_memory
from tests.plain_loop import same_bits
from tests.tiers import MEMORIES, PAGE, in_groups, members, needs, on_pages

LARGE = 1 << 40


def names_of(model: nn.Module, *, small: int = 0, group_bytes: int = LARGE) -> list[set[str]]:
    """The names of the parameters of each group."""
    groups = groups_of(model, list(model.parameters()), small=small, group_bytes=group_bytes)
    named = {param: name for name, param in model.named_parameters()}
    found: dict[ParamGroup, set[str]] = {}
    for param, (group, _) in groups.items():
        found.setdefault(group, set()).add(named[param])
    return list(found.values())


def llama(layers: int = 2) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": layers, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def test_the_groups_of_a_decoder() -> None:
    model = llama()
    found = names_of(model, small=1024)
    layer = {name for name, _ in model.named_parameters() if name.startswith("model.layers.1.")}
    norms = {name for name in layer if "layernorm" in name}
    assert norms in found
    assert layer - norms in found
    assert {"model.embed_tokens.weight"} in found
    assert len(found) == 2 * 2 + 3


def test_frozen_and_narrow_parameters_are_apart() -> None:
    block = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)])
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(*block)])})
    block[0].requires_grad_(False)
    assert names_of(model) == [
        {"blocks.0.0.weight", "blocks.0.0.bias"},
        {"blocks.0.1.weight", "blocks.0.1.bias"},
        {"blocks.0.2.weight", "blocks.0.2.bias"},
    ]


def test_the_innermost_list_counts_and_a_sequence_only_where_there_is_no_list() -> None:
    stage = nn.ModuleList([nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)) for _ in range(2)])
    model = nn.ModuleDict({"stages": nn.ModuleList([stage]), "head": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
    assert names_of(model) == [
        {"stages.0.0.0.weight", "stages.0.0.1.weight"},
        {"stages.0.1.0.weight", "stages.0.1.1.weight"},
        {"head.0.weight", "head.0.bias"},
        {"head.1.weight", "head.1.bias"},
    ]


def test_what_several_blocks_share_is_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    assert {"0.weight"} in names_of(model)


def test_groups_are_cut_at_their_size() -> None:
    model = nn.Sequential(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5))))
    model = nn.ModuleDict({"blocks": nn.ModuleList(model.children())})
    assert [len(names) for names in names_of(model, group_bytes=2 * 64 * 64 * 4)] == [2, 2, 1]
    assert [len(names) for names in names_of(model, group_bytes=0)] == [1] * 5


def test_sizes_follow_the_budget() -> None:
    assert group_sizes(1 << 50)[0] == MOST_GROUP_BYTES
    assert list(group_sizes(32 << 20)) == sorted(group_sizes(32 << 20), reverse=True)
    assert group_sizes(32 << 20)[0] < 32 << 20


@pytest.mark.parametrize(("movable", "align"), [(True, 4096), (False, 64)])
def test_members_lie_one_after_another(movable: bool, align: int) -> None:
    group = ParamGroup("g", [torch.Size([3, 47]), torch.Size([7]), torch.Size([5000])], movable=movable)
    assert [start % align for start in group.starts] == [0, 0, 0]
    assert group.starts[1] >= 3 * 47
    assert group.numel == group.starts[2] + 5000


def test_a_block_ends_with_its_last_part(tmp_path: Path) -> None:
    _, memory = open_memory(PTMConfig(host_memory="4MiB", disk=str(tmp_path), page_size=PAGE))
    pool, group = memory.pool, ParamGroup("g", [torch.Size([8]), torch.Size([8])], movable=True)
    first, second = (group.part(n, ".grad", Tag.GRAD, torch.float32, pool) for n in range(2))
    assert first.block is second.block
    again = group.part(0, ".grad", Tag.GRAD, torch.float32, pool)
    assert again.block is not first.block, "its place there is taken"
    assert group.part(1, ".grad", Tag.GRAD, torch.bfloat16, pool).block.dtype == torch.bfloat16
    pool.forget(first)
    assert first.block in list(pool.tensors())
    pool.forget(second)
    assert first.block not in list(pool.tensors())
    memory.close()


def test_parts_are_stored_in_any_order(tmp_path: Path) -> None:
    _, memory = open_memory(PTMConfig(host_memory="4MiB", disk=str(tmp_path), page_size=PAGE))
    pool, group = memory.pool, ParamGroup("g", [torch.Size([4096])] * 3, movable=True)
    parts = [group.part(n, "", Tag.STATE, torch.float32, pool, fill=2.0) for n in range(3)]
    for number in (2, 0):
        window = Windows(pool).open(parts[number], 0, 4096)
        assert torch.equal(Windows(pool).ready(window), torch.full((4096,), 2.0))
        Windows(pool).ready(window).fill_(number)
        Windows(pool).close(window, wrote=True)
    values = pool.fault(parts[0].block)
    assert [float(part.of(values).mean()) for part in parts] == [0.0, 2.0, 2.0]
    assert all(float(part.of(values).std()) == 0 for part in parts)
    memory.close()


def odd() -> nn.Sequential:
    """Sizes that are no multiples of anything."""
    torch.manual_seed(3)
    block = [nn.Sequential(nn.Linear(47, 53), nn.Tanh(), nn.Linear(53, 47), nn.LayerNorm(47)) for _ in range(6)]
    return nn.Sequential(nn.ModuleList(block))[0]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_odd_sizes_have_the_bits_of_plain(clip: float | None, tmp_path: Path) -> None:
    def run(model: nn.ModuleList, engine: Engine | None) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if engine is not None:
            optimizer = engine.bind_optimizer(optimizer)
        for number in range(5):
            for part in range(2):
                hidden = torch.linspace(-1, 1, 47 * 8).view(8, 47) * (number + part + 1)
                # Every second block has no gradient in the second of them, and one never has.
                for index, block in enumerate(model):
                    if index != 5 and not (part and index % 2):
                        hidden = block(hidden)
                hidden.square().sum().backward()
            if clip is not None and engine is not None:
                engine.clip_grad_norm_(clip)
            elif clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    expected = run(odd(), None)
    _, need = needs(odd(), tmp_path, "host+disk")
    model = odd()
    with in_groups(), on_pages(model, "host+disk", need // 2, tmp_path) as engine:
        found = run(model, engine)
        assert members(engine) > 1
        assert engine.pool.stats.evictions > 0
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


class Late(nn.Module):
    """A block with a member that has no gradient before the third step, and one that is frozen for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        hidden = self.first(hidden).tanh()
        if number >= 2:
            hidden = hidden + self.late(hidden)
        return self.last(hidden)


def momentum(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def filled(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.5)


def adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("make", [adamw, momentum, filled])
def test_members_that_come_late_are_frozen_changed_and_loaded(
    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer], kind: str, tmp_path: Path
) -> None:
    def build() -> nn.ModuleList:
        torch.manual_seed(5)
        return nn.ModuleList([Late() for _ in range(8)])

    def run(model: nn.ModuleList, engine: Engine | None) -> list[torch.Tensor]:
        optimizer = make(model.parameters())
        if engine is not None:
            optimizer = engine.bind_optimizer(optimizer)
        for number in range(9):
            if number in (4, 6):
                model[1].first.requires_grad_(number == 6)
            if number == 5:
                state = copy.deepcopy(optimizer.state_dict())
                for param in model[2].parameters():
                    param.data = param.data * 0.5
            if number == 7:
                optimizer.load_state_dict(state)
            hidden = torch.linspace(-1, 1, 64 * 4).view(4, 64)
            for block in model:
                hidden = hidden + block(hidden, number)
            hidden.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    expected = run(build(), None)
    _, need = needs(build(), tmp_path, kind, optimizer=lambda model: make(model.parameters()))
    model = build()
    with in_groups(), on_pages(model, kind, need // 2, tmp_path) as engine:
        found = run(model, engine)
        assert members(engine) > 1
        assert engine.pool.stats.evictions > 0
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("away", [False, True])
def test_a_member_that_is_given_another_shape_leaves_its_group(away: bool, tmp_path: Path) -> None:
    def build() -> nn.ModuleList:
        torch.manual_seed(6)
        return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(8)])

    def run(model: nn.ModuleList, engine: Engine | None) -> list[torch.Tensor]:
        if engine is not None and away:
            for block in {slot.value.block for slot in engine.slots}:
                if block in engine.pool.eviction:
                    engine.pool.admission.evict(block)
        last = model[7][1]
        last.weight.data = last.weight.data[:32].clone()
        last.bias.data = last.bias.data[:32].clone()
        if engine is not None:
            engine.follow()
        optimizer = adamw(model.parameters())
        if engine is not None:
            optimizer = engine.bind_optimizer(optimizer)
        for number in range(4):
            hidden = torch.linspace(-1, 1, 64 * 4).view(4, 64) + number
            for block in model:
                hidden = block(hidden)
            hidden.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    expected = run(build(), None)
    _, need = needs(build(), tmp_path, "host+disk")
    model = build()
    with in_groups(), on_pages(model, "host+disk", need // 2, tmp_path) as engine:
        assert engine.slots.by_name["7.1.weight"].value.block.parts > 1
        found = run(model, engine)
        assert engine.slots.by_name["7.1.weight"].value.block.parts == 1
        assert engine.slots.by_name["7.0.weight"].value.block.parts > 1
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_what_an_unknown_optimizer_needs_for_a_large_embedding_is_no_reason_against_groups(tmp_path: Path) -> None:
    """As 8B on a card of 16 GB: any optimizer at all would need more than half of it, for the embedding alone."""
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 12, "vocab_size": 2048}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    _, need = needs(model, tmp_path, "mock+host")
    with on_pages(model, "mock+host", need // 2, tmp_path) as engine:
        most = engine.needs.estimate(ANY_OPTIMIZER)
        assert 2 * most.total_bytes > need // 2
        assert "embed_tokens" in most.reason
        assert members(engine) > 1
