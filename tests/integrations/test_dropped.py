"""What is dropped is gone: of a Trainer, an Accelerator or an engine that nobody uses any more, no object is left."""

from __future__ import annotations

import enum
import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.transformers import Trainer, from_pretrained
from torch import nn
from transformers import AutoModelForCausalLM

import ptm_accel
from ptm_accel import opening
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import PagedModelError
from ptm_accel.hardware.cache import RateCache
from tests.tiers import config, open_memory

KEPT = (enum.Enum, RateCache)
"""Made once in a process."""


def alive() -> Counter[str]:
    """How many objects of ours there are, by class.

    The first collection finds that a model is not used any more, whose tiers are then closed; the second takes these.
    """
    gc.collect()
    gc.collect()
    kinds = (type(each) for each in gc.get_objects() if not isinstance(each, KEPT))
    # Some classes of others have no module.
    ours = (kind for kind in kinds if str(kind.__module__).startswith(("ptm_accel.", "integrations.")))
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in ours)


def small(tiny: ModuleType) -> Any:
    return tiny.model(num_hidden_layers=2, hidden_size=16, intermediate_size=32, vocab_size=512)


def trained(tiny: ModuleType, folder: Path, budget: str, model: Any = None, **given: Any) -> Any:
    arguments = tiny.arguments(folder, max_steps=2, **given.pop("arguments", {}))
    options = {**tiny.budget(budget, folder), **given.pop("options", {})}
    if budget == "tight":
        options["host_memory"] = "384KiB"
    model = small(tiny) if model is None else model
    trainer = Trainer(model=model, args=arguments, train_dataset=tiny.data(), ptm_config=options, **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize("budget", ["roomy", "tight"])
def test_of_twenty_trainers_nothing_is_left(budget: str, tiny: ModuleType, tmp_path: Path) -> None:
    before = alive()
    for _ in range(20):
        trained(tiny, tmp_path, budget)
    assert not alive() - before
    assert not opening._opened


def of_an_accelerator(tiny: ModuleType, folder: Path, budget: str) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=tiny.budget(budget, folder))
    model = small(tiny)
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    in_steps(prepared[0], prepared[1], accelerator.backward, tiny)


def of_an_engine(tiny: ModuleType, folder: Path, budget: str) -> Engine:
    model = small(tiny)
    engine = Engine.attach(model, PTMConfig.load(tiny.budget(budget, folder)))
    in_steps(model, engine.bind_optimizer(torch.optim.AdamW(model.parameters())), torch.Tensor.backward, tiny)
    return engine


def in_steps(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], object], tiny: ModuleType) -> None:
    for row in tiny.data(3):
        backward(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
        optimizer.step()
        optimizer.zero_grad()


def of_a_closed_engine(tiny: ModuleType, folder: Path, budget: str) -> None:
    of_an_engine(tiny, folder, budget).close()


def of_a_detached_engine(tiny: ModuleType, folder: Path, budget: str) -> None:
    in_steps(model := of_an_engine(tiny, folder, budget).detach(), torch.optim.SGD(model.parameters()), backward, tiny)


def backward(loss: torch.Tensor) -> None:
    loss.backward()


def of_a_graph(tiny: ModuleType, folder: Path, budget: str) -> None:
    model = of_an_engine(tiny, folder, budget).model
    row = tiny.data(1)[0]
    model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
    looked_at = [(param.grad, param.data) for param in model.parameters()]
    model(input_ids=row["input_ids"][None], labels=row["labels"][None])
    del looked_at


def of_adapters(tiny: ModuleType, folder: Path, budget: str) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trained(tiny, folder, budget, peft.get_peft_model(small(tiny), lora))


def of_checkpointing_and_masters(tiny: ModuleType, folder: Path, budget: str) -> None:
    given = {"arguments": {"gradient_checkpointing": True}, "options": {"master_weights": "fp32"}}
    trained(tiny, folder, budget, small(tiny).bfloat16(), **given)


def of_an_error(tiny: ModuleType, folder: Path, budget: str) -> None:
    for step in (0, 1):
        with pytest.raises(KeyError, match="of a callback") as kept:
            trained(tiny, folder, budget, callbacks=[Raises(step)])
        assert kept.value.args


class Raises(transformers.TrainerCallback):
    """Ends training by an error.

    Args:
        step: before this one.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: transformers.TrainerState, *rest: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyError("of a callback")


def of_a_model_that_was_read(tiny: ModuleType, folder: Path, budget: str) -> None:
    small(tiny).save_pretrained(folder / "saved")
    model = from_pretrained(AutoModelForCausalLM, folder / "saved", tiny.budget(budget, folder))
    trainer = Trainer(
        model=model, args=tiny.arguments(folder), train_dataset=tiny.data(), ptm_config=tiny.budget(budget, folder)
    )
    trainer.train()
    trainer.evaluate(tiny.data(4))
    trainer.save_model(str(folder / "again"))
    ptm_accel.plain_copy(model)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("budget", ["roomy", "tight"])
@pytest.mark.parametrize(
    "use",
    [
        of_an_accelerator,
        of_an_engine,
        of_a_closed_engine,
        of_a_detached_engine,
        of_a_graph,
        of_adapters,
        of_checkpointing_and_masters,
        of_an_error,
        of_a_model_that_was_read,
    ],
)
def test_nothing_is_left(
    use: Callable[[ModuleType, Path, str], object], budget: str, tiny: ModuleType, tmp_path: Path
) -> None:
    before = alive()
    use(tiny, tmp_path, budget)
    assert not alive() - before


def test_of_trainers_of_one_model_its_pages_are_left(tiny: ModuleType, tmp_path: Path) -> None:
    model = small(tiny)
    found = []
    for _ in range(4):
        trained(tiny, tmp_path, "roomy", model)
        found.append(alive())
    assert found[-1] == found[-2]
    del model
    assert not {name for name in alive() if "Slot" in name or "Engine" in name or "Pool" in name}


def test_a_parameter_that_is_kept_keeps_no_other(tmp_path: Path) -> None:
    """Nor does a backward that is left call what is gone."""

    def drop() -> tuple[nn.Parameter, torch.Tensor]:
        model = nn.Linear(4, 4)
        Engine.attach(model, config(), memory=open_memory("host+disk", 1 << 20, tmp_path))
        return model.bias, model(torch.ones(2, 4))

    before = alive()
    bias, output = drop()
    # What unpacks saved tensors is the graph's.
    graphs = {"ptm_accel.model.saved._Pack", "ptm_accel.model.saved._Unpack"}
    assert {*(alive() - before)} - graphs == {"ptm_accel.model.away.AwayParameter"}
    output.sum().backward()
    with pytest.raises(
        PagedModelError, match=r"of shape \(4,\) are gone: its model is no longer in use, or its engine"
    ):
        bias.sum()
