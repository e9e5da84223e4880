"""A refusal at any stage leaves the model as it was, though the error is kept: other options can be tried at once."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.transformers import Trainer, from_pretrained, ptm_trainer
from ptm_accel.integrations.transformers.callback import PTMCallback
from torch import nn
from transformers import AutoModelForCausalLM

from ptm_accel import needs, opening, pages
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of, living_engines
from ptm_accel.errors import BudgetError, ConfigError, DiskError, PTMError
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim import states
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.training import Training
from tests.figures import FIGURE, named_bytes
from tests.plain_loop import same_bits
from tests.tiers import config, open_memory


class RefusedError(BudgetError):
    """What a stage refuses with."""


def refuse_at(patched: pytest.MonkeyPatch, owner: Any, name: str, call: int = 1) -> None:
    """Has a function refuse in its call number `call`, and in no other."""
    original, calls = getattr(owner, name), iter(range(1, 1 << 20))

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise RefusedError(name)
        return original(*args, **kwargs)

    patched.setattr(owner, name, run)


COMES_ONTO_PAGES: list[tuple[Any, str, int]] = [
    (pages, "take_parameters", 2),
    (needs, "refuse_short", 1),
    (pages.Pages, "bring_in", 1),
    (ParamSlot, "adopt", 1),
    (ParamSlot, "adopt", 3),
    (ParamSlot, "come_onto_pages", 3),
    (pages.StateDictHooks, "install", 1),
    (Training, "begin", 1),
    (Engine, "_bring_in", 1),
]
PREPARES: list[tuple[Any, str, int]] = [
    (Accelerator, "prepare_model", 1),
    (PTMAccelerator, "prepare_optimizer", 1),
    (Training, "meet_trainable", 1),
    (pages.Pages, "decide_to_plan", 2),
    (states.States, "of", 3),
    (PagedOptimizer, "__init__", 1),
]
TRAINS: list[tuple[Any, str, int]] = [
    (transformers.Trainer, "create_optimizer", 1),
    (transformers.Trainer, "create_scheduler", 1),
    (transformers.Trainer, "_inner_training_loop", 1),
    (transformers.trainer_callback.DefaultFlowCallback, "on_epoch_begin", 1),
    (transformers.trainer_callback.DefaultFlowCallback, "on_step_begin", 1),
    (transformers.Trainer, "compute_loss", 1),
    (PTMAccelerator, "backward", 1),
    (PTMAccelerator, "clip_grad_norm_", 1),
    (PagedOptimizer, "expect", 1),
]
STAGES = [*COMES_ONTO_PAGES, *PREPARES, *TRAINS]


def named(stage: tuple[Any, str, int]) -> str:
    return f"{stage[1]}-{stage[2]}"


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A tight budget."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return {"host_memory": "1MiB", "page_size": 4096, "disk": str(folder)}


def other(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "host_memory": "1536KiB"}


def look(model: nn.Module) -> dict[str, Any]:
    """All that can be seen of an ordinary model."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: param.grad for name, param in model.named_parameters()},
        "kinds": {name: type(param).__name__ for name, param in model.named_parameters()},
        "objects": [id(param) for param in model.parameters()],
        "hooks": [
            [len(hooks) for name, hooks in sorted(vars(module).items()) if name.endswith("_hooks")]
            for module in model.modules()
        ],
        "post_hooks": [len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()],
        "own": [sorted(name for name in vars(module) if not name.startswith("_")) for module in model.modules()],
    }


def build(tiny: ModuleType, cls: Any, model: nn.Module, folder: Path, **given: Any) -> Any:
    arguments = tiny.arguments(folder, max_steps=2, max_grad_norm=1.0)
    return cls(model=model, args=arguments, train_dataset=tiny.data(), **given)


def with_gradient(model: nn.Module) -> nn.Module:
    """One that a gradient is left on; the Trainer drops it as training begins."""
    param = next(iter(model.parameters()))
    param.grad = torch.randn_like(param)
    return model


@pytest.fixture(scope="module")
def plain(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that a plain Trainer comes to."""
    trainer = build(tiny, transformers.Trainer, tiny.model(), tmp_path_factory.mktemp("plain"))
    trainer.train()
    weights: dict[str, torch.Tensor] = tiny.weights(trainer.model)
    return weights


@pytest.fixture
def nothing_left() -> Iterator[Callable[[], None]]:
    """Looks whether anything is on pages, though nothing has been collected."""
    gc.collect()

    def check() -> None:
        assert not living_engines()
        assert not any(opened.users for opened in opening._opened.values())

    return check


# ---- the Trainer -----------------------------------------------------------------------------------------------------


@pytest.mark.thinned(8)
@pytest.mark.parametrize("stage", STAGES, ids=named)
def test_a_trainer_that_refuses_leaves_the_model_as_it_was(
    stage: tuple[Any, str, int],
    tiny: ModuleType,
    plain: dict[str, torch.Tensor],
    options: dict[str, Any],
    nothing_left: Callable[[], None],
    tmp_path: Path,
) -> None:
    model = with_gradient(tiny.model())
    before = look(model)
    drops_gradients = stage in TRAINS[3:]
    kept = []
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, *stage)
        with pytest.raises(RefusedError) as caught:
            build(tiny, Trainer, model, tmp_path, ptm_config=options).train()
        kept.append(caught.value)
    nothing_left()
    after = look(model)
    gradients = before.pop("gradients"), after.pop("gradients")
    assert same_bits(after, before)
    if not drops_gradients:
        assert same_bits(*({name: g for name, g in each.items() if g is not None} for each in reversed(gradients)))
    trainer = build(tiny, Trainer, model, tmp_path, ptm_config=other(options))
    trainer.train()
    assert tiny.same(tiny.weights(trainer.model), plain)
    assert kept


def test_the_figure_that_an_error_names_works_while_the_error_is_kept(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    """Rprop updates whole tensors and needs more than AdamW, which is counted with before the optimizer is known."""
    kept = []

    def train(cls: Any, **given: Any) -> Any:
        model = tiny.model()
        trainer = build(tiny, cls, model, tmp_path, optimizers=(torch.optim.Rprop(model.parameters()), None), **given)
        trainer.train()
        return tiny.weights(trainer.model)

    nbytes = 17 * 4096
    for _ in range(2):
        with pytest.raises(BudgetError, match=f"to at least {FIGURE}") as caught:
            train(Trainer, ptm_config={**options, "host_memory": nbytes})
        kept.append(caught.value)
        nbytes = named_bytes(f"to at least {FIGURE}", caught.value)
    ours = train(Trainer, ptm_config={**options, "host_memory": nbytes})
    assert tiny.same(ours, train(transformers.Trainer))


def test_the_same_trainer_can_be_tried_again(
    tiny: ModuleType, plain: dict[str, torch.Tensor], options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = build(tiny, Trainer, tiny.model(), tmp_path, ptm_config=options)
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, transformers.trainer_callback.DefaultFlowCallback, "on_epoch_begin")
        with pytest.raises(RefusedError):
            trainer.train()
    assert engine_of(trainer.model) is None
    assert trainer.optimizer is None
    trainer.train()
    assert tiny.same(tiny.weights(trainer.model), plain)


def test_a_model_that_has_been_trained_stays_on_its_pages(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = build(tiny, Trainer, tiny.model(), tmp_path, ptm_config=options)
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, transformers.trainer_callback.DefaultFlowCallback, "on_step_begin", 2)
        with pytest.raises(RefusedError):
            trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    engine.check_integrity()


def test_a_model_that_was_evaluated_before_comes_off_as_well(
    tiny: ModuleType,
    plain: dict[str, torch.Tensor],
    options: dict[str, Any],
    nothing_left: Callable[[], None],
    tmp_path: Path,
) -> None:
    trainer = build(tiny, Trainer, tiny.model(), tmp_path, ptm_config=options, eval_dataset=tiny.data(4))
    trainer.evaluate()
    assert engine_of(trainer.model) is not None
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, PTMAccelerator, "prepare_optimizer")
        with pytest.raises(RefusedError) as caught:
            trainer.train()
    nothing_left()
    again = build(tiny, Trainer, trainer.model, tmp_path, ptm_config=other(options))
    again.train()
    assert tiny.same(tiny.weights(again.model), plain)
    del caught


class WithReference(transformers.Trainer):
    """Evaluates another model, as DPO does."""

    def __init__(self, *args: Any, reference: nn.Module, refuses: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
        if refuses:
            raise RefusedError("while it was made")

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            wanted = self.reference(**inputs).logits
        outputs = model(**inputs)
        return outputs.loss + (outputs.logits - wanted).square().mean()


@pytest.mark.parametrize("stage", ["made", "trained"])
@pytest.mark.parametrize("again", ["same", "another"])
def test_a_reference_model_is_as_it_was_too(
    stage: str,
    again: str,
    tiny: ModuleType,
    options: dict[str, Any],
    nothing_left: Callable[[], None],
    tmp_path: Path,
) -> None:
    plain = build(tiny, WithReference, tiny.model(), tmp_path, reference=tiny.model(1))
    plain.train()
    model, reference, cls = tiny.model(), tiny.model(1), ptm_trainer(WithReference)
    before = look(model), look(reference)
    kept = []
    with pytest.MonkeyPatch.context() as patched:
        given: dict[str, Any] = {"reference": reference, "ptm_config": options}
        if stage == "made":
            with pytest.raises(RefusedError) as caught:
                build(tiny, cls, model, tmp_path, refuses=True, **given)
        else:
            refuse_at(patched, PTMAccelerator, "prepare_optimizer")
            trainer = build(tiny, cls, model, tmp_path, **given)
            assert engine_of(reference) is not None
            with pytest.raises(RefusedError) as caught:
                trainer.train()
        kept.append(caught.value)
    nothing_left()
    assert same_bits(look(model), before[0])
    assert same_bits(look(reference), before[1])
    if again == "another" or stage == "made":
        trainer = build(tiny, cls, model, tmp_path, reference=reference, ptm_config=other(options))
    trainer.train()
    assert tiny.same(tiny.weights(trainer.model), tiny.weights(plain.model))
    assert engine_of(reference) is not None, "on pages again"


@pytest.mark.parametrize("how", ["attached", "read"])
def test_a_model_that_was_on_pages_before_stays_there(
    how: str, tiny: ModuleType, plain: dict[str, torch.Tensor], options: dict[str, Any], tmp_path: Path
) -> None:
    if how == "attached":
        model = tiny.model()
        Engine.attach(model, PTMConfig.load(options))
    else:
        tiny.model().save_pretrained(tmp_path / "saved")
        model = from_pretrained(AutoModelForCausalLM, tmp_path / "saved", options)
        # As a model that is built.
        model.train()
    engine = engine_of(model)
    assert engine is not None
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, PagedOptimizer, "__init__")
        with pytest.raises(RefusedError):
            build(tiny, Trainer, model, tmp_path, ptm_config=options).train()
    assert engine_of(model) is engine
    engine.check_integrity()
    text = (
        r"this model is already on pages with host_memory='1MiB', and cannot be moved to host_memory='1536KiB' while "
        r"it is\. Use the same ptm_config, or call `engine_of\(model\)\.detach\(\)` first\."
    )
    with pytest.raises(ConfigError, match=text):
        build(tiny, Trainer, model, tmp_path, ptm_config=other(options)).train()
    build(tiny, Trainer, model, tmp_path, ptm_config=options).train()
    assert tiny.same(tiny.weights(model), plain)


def test_layers_are_whole_again(
    tiny: ModuleType, options: dict[str, Any], nothing_left: Callable[[], None], tmp_path: Path
) -> None:
    model = tiny.model()
    before = look(model)
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, PTMAccelerator, "prepare_optimizer")
        with pytest.raises(RefusedError):
            build(tiny, Trainer, model, tmp_path, ptm_config={**options, "token_slices": 2}).train()
    nothing_left()
    assert same_bits(look(model), before)


def test_what_was_frozen_for_training_is_garbage_again(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    """`gc.freeze` beside a device: whatever ends training ends it."""
    trainer = build(tiny, Trainer, tiny.model(), tmp_path, ptm_config=options)
    callback = next(each for each in trainer.callback_handler.callbacks if isinstance(each, PTMCallback))
    with pytest.MonkeyPatch.context() as patched:
        thawed: list[None] = []
        patched.setattr(gc, "unfreeze", lambda: thawed.append(None))
        refuse_at(patched, PTMAccelerator, "backward")
        patched.setattr(callback, "on_train_begin", lambda *args, **kwargs: vars(callback).update(_frozen=True))
        with pytest.raises(RefusedError):
            trainer.train()
    assert thawed


# ---- the Accelerator -------------------------------------------------------------------------------------------------


def steps(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], object], tiny: ModuleType) -> None:
    for row in tiny.data(3):
        backward(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
        optimizer.step()
        optimizer.zero_grad()


def stepped(tiny: ModuleType) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has been trained plain, with its optimizer and a gradient."""
    model = tiny.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, torch.Tensor.backward, tiny)
    row = tiny.data(1)[0]
    model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
    return model, optimizer


@pytest.mark.thinned(4)
@pytest.mark.parametrize("stage", [*COMES_ONTO_PAGES[3:7], *PREPARES], ids=named)
def test_an_accelerator_that_refuses_leaves_model_and_optimizer_as_they_were(
    stage: tuple[Any, str, int],
    tiny: ModuleType,
    options: dict[str, Any],
    nothing_left: Callable[[], None],
) -> None:
    plain, stock = stepped(tiny)
    model, optimizer = stepped(tiny)
    before, state = look(model), copy.deepcopy(optimizer.state_dict())
    accelerator = PTMAccelerator(cpu=True, ptm_config=options)
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, *stage)
        with pytest.raises(RefusedError) as caught:
            accelerator.prepare(optimizer, model)
    nothing_left()
    assert not accelerator._models
    assert not accelerator._optimizers
    assert same_bits(look(model), before)
    assert same_bits(optimizer.state_dict(), state)
    again = PTMAccelerator(cpu=True, ptm_config=other(options))
    prepared, paged = again.prepare(model, optimizer)
    paged.zero_grad()
    stock.zero_grad()
    steps(prepared, paged, again.backward, tiny)
    steps(plain, stock, torch.Tensor.backward, tiny)
    assert tiny.same(tiny.weights(model), tiny.weights(plain))
    del caught


def test_a_model_that_was_prepared_before_its_optimizer_stays_on_pages(
    tiny: ModuleType, options: dict[str, Any]
) -> None:
    model, optimizer = stepped(tiny)
    state = copy.deepcopy(optimizer.state_dict())
    accelerator = PTMAccelerator(cpu=True, ptm_config=options)
    prepared = accelerator.prepare(model)
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, states.States, "put", 3)
        with pytest.raises(RefusedError):
            accelerator.prepare(optimizer)
    engine = engine_of(prepared)
    assert engine is not None
    assert engine.optimizer is None
    engine.check_integrity()
    assert same_bits(optimizer.state_dict(), state)
    accelerator.prepare(optimizer)


def test_free_memory_leaves_a_model_alone_that_has_left_its_pages(tiny: ModuleType, options: dict[str, Any]) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=options)
    engine = accelerator.attach(model := tiny.model())
    engine.detach()
    with_gradient(model)
    accelerator.free_memory()
    assert next(iter(model.parameters())).grad is not None


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_a_model_without_values_has_none_again(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    memory = open_memory("host+disk", 1 << 20, tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        refuse_at(patched, Training, "begin")
        with pytest.raises(RefusedError):
            Engine.attach(model, config(), memory=memory)
    assert memory.closed
    assert [type(param) for param in model.parameters()] == [nn.Parameter] * 3
    assert all(param.is_meta for param in model.parameters())
    assert model[1].weight is model[0].weight


def test_a_disk_that_fails_then_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    memory = open_memory("host+disk", 1 << 20, tmp_path)
    engine = Engine.attach(model, config(), memory=memory)
    for block in engine.slots.blocks():
        memory.pool.admission.evict(block)
    monkeypatch.setattr(memory.pool, "snapshot", Unreadable())
    with pytest.raises(DiskError, match="cannot be read"):
        engine.detach(check=False)
    assert memory.closed
    assert engine_of(model) is None
    with pytest.raises(
        PTMError,
        match=r"the values of a parameter of shape \(64, 64\) are gone: .* `engine.detach\(\)` instead of `close",
    ):
        model[0].weight.sum()


class Unreadable:
    """A disk that nothing can be read from."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise DiskError(5, "cannot be read", "disk")
