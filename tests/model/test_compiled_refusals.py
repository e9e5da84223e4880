"""What cannot work compiled on pages is refused by name, with the numbers and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, UnsupportedError
from tests.figures import FIGURE, named_bytes
from tests.model.nets import Net, Pair, compile_layers, inputs
from tests.tiers import PAGE, on_pages

FITS = 16 << 20


@pytest.fixture(autouse=True)
def _clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "reduce-overhead"}, 'mode="reduce-overhead"'),
        ({"mode": "max-autotune"}, 'mode="max-autotune"'),
        ({"backend": "cudagraphs"}, 'backend="cudagraphs"'),
        ({"options": {"freezing": True}}, "inductor's freezing"),
    ],
)
def test_what_bakes_addresses_or_weights_is_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    net = compile_layers(Net(), **options)
    with pytest.raises(UnsupportedError, match=rf"^layers\.0 is compiled with {re.escape(named)}"):
        Engine.attach(net, PTMConfig(host_memory=FITS, page_size=PAGE))
    other = Net()
    message = rf"^the model is compiled with {re.escape(named)}"
    with on_pages(other, "host+disk", FITS, tmp_path), pytest.raises(UnsupportedError, match=message):
        torch.compile(other, **options)(**inputs(0))


def test_compiled_autograd_is_refused() -> None:
    net = compile_layers(Net(), backend="eager")
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(UnsupportedError, match="compiled_autograd"):
        Engine.attach(net, PTMConfig(host_memory=FITS, page_size=PAGE))


def test_a_compiled_function_that_calls_the_model_is_refused(tmp_path: Path) -> None:
    net = Net()
    with on_pages(net, "host+disk", FITS, tmp_path):
        with pytest.raises(UnsupportedError, match=r"the model is called from code compiled .*layer\.compile\(\)"):
            torch.compile(lambda x: net(x) * 2, backend="eager")(**inputs(0))
        with pytest.raises(Exception, match="reason: a model on pages is called from a compiled function"):
            torch.compile(lambda x: net(x) * 2, backend="eager", fullgraph=True)(**inputs(0))


def test_a_compiled_forward_is_refused(tmp_path: Path) -> None:
    net = Net()
    layer: Any = net.layers[0]
    layer.forward = torch.compile(layer.forward, backend="eager")
    with (
        on_pages(net, "host+disk", FITS, tmp_path),
        pytest.raises(UnsupportedError, match=r"^layers\.0\.up is called from code compiled"),
    ):
        net(**inputs(0))


def test_a_region_reading_outside_itself_in_one_graph_is_refused(tmp_path: Path) -> None:
    pair = Pair()
    with on_pages(pair, "host+disk", FITS, tmp_path):
        pair.reader = torch.compile(pair.reader, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="reads a parameter on pages of a module that is not under it"):
            pair(**inputs(0))


def test_a_region_larger_than_the_budget_is_refused_with_the_figure_that_works(tmp_path: Path) -> None:
    net = Net()
    with on_pages(net, "host+disk", 600 << 10, tmp_path) as engine:
        compiled = torch.compile(net, backend="aot_eager")
        with pytest.raises(BudgetError, match=r"Compile per layer .* host_memory to at least [\d.]+MiB\.$") as refusal:
            engine.follow(compiled)
        with pytest.raises(BudgetError, match="is compiled as one region"):
            compiled(**inputs(0))
    figure = named_bytes(f"at least {FIGURE}", refusal.value)
    net = Net()
    with on_pages(net, "host+disk", figure, tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(net.parameters(), fused=True))
        compiled = torch.compile(net, backend="aot_eager")
        for step in range(2):
            compiled(**inputs(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.pool.stats.evictions > 0
    layer = Net().layers[0]
    with on_pages(layer, "host+disk", FITS, tmp_path) as engine:
        enough = engine.needs.floor.total_bytes
    layer = Net().layers[0]
    layer.compile(backend="eager")
    with pytest.raises(BudgetError, match="Compile smaller parts of it"):
        Engine.attach(layer, PTMConfig(host_memory=enough, disk=str(tmp_path), page_size=PAGE))
