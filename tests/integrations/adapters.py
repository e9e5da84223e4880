"""Stories of a base and its adapters, told plain and on pages at the least budget, and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer
from transformers import AutoModelForCausalLM

import ptm_accel
from ptm_accel.engine import Engine, engine_of
from tests.integrations.least import least_options

LORA: dict[str, Any] = {
    "r": 4,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "lora_dropout": 0.1,
    "task_type": "CAUSAL_LM",
}


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{**LORA, **changes})


IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}

METHODS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lora,
    "dora": functools.partial(lora, use_dora=True),
    "pissa": functools.partial(lora, init_lora_weights="pissa", lora_dropout=0.0),
    "pissa_niter": functools.partial(lora, init_lora_weights="pissa_niter_4", lora_dropout=0.0),
    "olora": functools.partial(lora, init_lora_weights="olora"),
    "modules_to_save": functools.partial(lora, modules_to_save=["lm_head", "embed_tokens"]),
    "embeddings": functools.partial(lora, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "new_tokens": functools.partial(lora, trainable_token_indices=[1, 2, 3]),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM", **IA3),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p_tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "layer_norm": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
}


class Bench:
    """The same story told plain and on pages.

    Args:
        tiny: the tiny model and its data.
        folder: for what is saved.
        paged: which of the two.
        tied: whether the base's embeddings are tied.
        base: where the base was saved.
        options: the least ones, or roomier.
    """

    def __init__(
        self, tiny: ModuleType, folder: Path, paged: bool, tied: bool, base: Path, options: dict[str, Any]
    ) -> None:
        self.tiny = tiny
        self.folder = folder / ("paged" if paged else "plain")
        self.folder.mkdir(exist_ok=True)
        self.paged = paged
        self.tied = tied
        self.base = base
        self.options = options
        self.engines: list[Engine] = []

    def read(self, directory: Path | None = None, auto_cls: Any = AutoModelForCausalLM, **options: Any) -> Any:
        """The base, or another saved model."""
        torch.manual_seed(5)
        directory = directory or self.base
        if self.paged:
            model = ptm_accel.from_pretrained(auto_cls, directory, self.options, **options)
            engine = engine_of(model)
            assert engine is not None
            self.engines.append(engine)
            return model
        model = auto_cls.from_pretrained(directory, **options)
        # Aligned as pages are; what is mapped from a file is not, and on that `torch.svd_lowrank` depends.
        for param in model.parameters():
            param.data = param.data.clone()
        return model

    def train(
        self,
        model: Any,
        cls: Any = Trainer,
        *,
        plain: Any = transformers.Trainer,
        data: Any = None,
        resume: bool = False,
        **changes: Any,
    ) -> list[dict[str, Any]]:
        """The log of a short training."""
        torch.manual_seed(0)
        given = {"ptm_config": self.options} if self.paged else {}
        options = {"max_steps": 3, "learning_rate": 1e-2, "gradient_accumulation_steps": 2, **changes}
        trainer = (cls if self.paged else plain)(
            model=model,
            args=self.tiny.arguments(self.folder / "run", **options),
            train_dataset=self.tiny.data() if data is None else data,
            **given,
        )
        trainer.train(resume_from_checkpoint=resume)
        assert (engine_of(trainer.model) is not None) == self.paged
        history: list[dict[str, Any]] = self.tiny.history(trainer)
        assert any(line.get("grad_norm") for line in history)
        return history

    def end(self) -> None:
        """The models so far are used no longer: at the least budget there is room for one."""
        for engine in self.engines:
            if not engine.memory.closed:
                engine.check_integrity()
                engine.close()

    def loss(self, model: Any) -> float:
        row = self.tiny.data(1)[0]
        with torch.no_grad():
            loss: torch.Tensor = model.eval()(**{key: value[None] for key, value in row.items()}).loss
        return loss.item()

    def saved(self, model: Any, name: str, **options: Any) -> bytes:
        """The bytes of what `save_pretrained` writes."""
        model.save_pretrained(self.folder / name, **options)
        (file,) = (self.folder / name).glob("*.safetensors")
        return file.read_bytes()


Bases = dict[bool, tuple[Path, dict[str, Any]]]
"""The base, tied or not, with the least options for it."""

Story = Callable[[Bench], tuple[Any, Any]]
"""Returns a model, and everything that must be the same."""


@pytest.fixture(scope="module")
def bases(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """The base, tied or not, with the least options for it."""
    found = {}
    for tied in (False, True):
        directory = tmp_path_factory.mktemp("base")
        tiny.model(num_hidden_layers=2, tie_word_embeddings=tied).save_pretrained(directory)
        scratch = tmp_path_factory.mktemp("scratch")
        found[tied] = directory, least_options(directory, scratch)
    return found


def on(**cases: bool) -> pytest.MarkDecorator:
    """Parametrizes a test by name, each over a base whose embeddings are tied or not."""
    return pytest.mark.parametrize(("case", "compare"), list(cases.items()), ids=list(cases), indirect=["compare"])


@pytest.fixture
def compare(
    request: pytest.FixtureRequest,
    tiny: ModuleType,
    bases: Bases,
    tmp_path: Path,
) -> Callable[..., None]:
    """Tells a story plain and on pages, and compares everything."""
    tied: bool = getattr(request, "param", False)
    base, least = bases[tied]

    def tell(story: Story, room: float = 1.0) -> None:
        options = {**least, "host_memory": int(least["host_memory"] * room)}
        plain, expected = story(Bench(tiny, tmp_path, False, tied, base, options))
        bench = Bench(tiny, tmp_path, True, tied, base, options)
        model, values = story(bench)
        assert values == expected
        assert tiny.same(tiny.weights(model), tiny.weights(plain))
        for engine in bench.engines:
            assert engine.pool.stats.evictions > 0
            assert engine.pool.budget.peak_bytes <= options["host_memory"]
            if not engine.memory.closed:
                engine.check_integrity()
                engine.close()

    return tell
