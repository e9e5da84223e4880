"""`from_pretrained` on pages against the plain call: the same model, never whole in memory; what is refused."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from ptm_accel.integrations.transformers.loading import (
    _damaged,
    from_config,
    from_pretrained,
    load_weights,
    read_if_too_large,
)
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    core_model_loading,
)
from transformers.distributed import DistributedConfig

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import BudgetError, CheckpointError, UnsupportedError
from tests.integrations.saved_models import (
    ARCHITECTURES,
    DAMAGE,
    Save,
    assert_same_model,
    close,
    names_of_ties,
    options,
    truncate_a_shard,
)
from tests.plain_loop import same_bits
from tests.prepared import run_prepared
from tests.tiers import PAGE, config, open_memory
from tests.zoo import ENTRIES


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_is_read_as_ever(name: str, dtype: torch.dtype | None, saved: Save, tmp_path: Path) -> None:
    directory = saved(name)
    assert len(list(directory.glob("*.safetensors"))) > 1
    plain = ARCHITECTURES[name].from_pretrained(directory, dtype=dtype)
    ours = from_pretrained(ARCHITECTURES[name], directory, options(tmp_path, name=name), dtype=dtype)
    engine = engine_of(ours)
    assert engine is not None
    # Mamba's floor is above its size; half the bytes may fit.
    assert engine.pool.stats.evictions > 0 or dtype is not None or name == "mamba"
    assert_same_model(ours, plain)
    if hasattr(plain, "generation_config"):
        assert str(ours.generation_config) == str(plain.generation_config)
    batch = ENTRIES[name].batch_at(0)
    if dtype is None:
        with torch.no_grad():
            assert same_bits(ours(**batch).loss, plain(**batch).loss)
    close(ours)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "t5"])
def test_a_model_that_was_read_trains_as_ever(name: str, saved: Save, tmp_path: Path) -> None:
    plain = ARCHITECTURES[name].from_pretrained(saved(name))
    ours = from_pretrained(ARCHITECTURES[name], saved(name), options(tmp_path, name=name))
    engine = engine_of(ours)
    assert engine is not None
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    mine = engine.bind_optimizer(torch.optim.AdamW(ours.parameters(), lr=1e-2, fused=True))
    for step in range(3):
        losses = []
        for model, optimizer in ((ours, mine), (plain, theirs)):
            loss = model(**ENTRIES[name].batch_at(step)).loss
            loss.backward()
            losses.append(loss.item())
            if model is ours:
                losses.append(engine.clip_grad_norm_(0.5).item())
            else:
                losses.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[:2] == losses[2:]
    assert_same_model(ours, plain)
    close(ours)


def test_a_model_is_read_onto_a_device(saved: Save, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved("mixtral"))
    memory = open_memory("mock+host+disk", 1_090_000, tmp_path, host_bytes=1_600_000)
    ours = from_pretrained(AutoModelForCausalLM, saved("mixtral"), config(), memory=memory)
    assert_same_model(ours, plain)
    close(ours)


def test_a_saved_copy_has_the_same_bytes(saved: Save, tmp_path: Path) -> None:
    directory = saved("mixtral", "1GB")
    ours = from_pretrained(AutoModelForCausalLM, directory, options(tmp_path))
    ours.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert (tmp_path / "again/config.json").read_bytes() == (directory / "config.json").read_bytes()
    close(ours)


def test_a_new_head_has_the_initial_values_of_the_plain_call(saved: Save, tmp_path: Path) -> None:
    arguments = {"num_labels": 7, "pad_token_id": 0, "output_loading_info": True}
    for name in ("llama", "bert"):
        # Making it may take random numbers.
        directory = saved(name)
        torch.manual_seed(5)
        plain, info = AutoModelForSequenceClassification.from_pretrained(directory, **arguments)
        after = torch.rand(1)
        torch.manual_seed(5)
        ours, our_info = from_pretrained(AutoModelForSequenceClassification, directory, options(tmp_path), **arguments)
        assert torch.rand(1) == after
        assert our_info["missing_keys"] == info["missing_keys"] != set()
        assert our_info["unexpected_keys"] == info["unexpected_keys"]
        assert_same_model(ours, plain)
        close(ours)


def test_a_base_model_is_read_from_the_checkpoint_of_a_larger_one(saved: Save, tmp_path: Path) -> None:
    plain = AutoModel.from_pretrained(saved("llama"))
    ours = from_pretrained(AutoModel, saved("llama"), options(tmp_path))
    assert_same_model(ours, plain)
    close(ours)


def both_names(directory: Path, to: Path, *, equal: bool, only_head: bool = False) -> None:
    """A checkpoint of a tied model that has the weight under both its names."""
    shutil.copytree(directory, to)
    from safetensors.torch import load_file, save_file

    tensors = load_file(to / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if equal else embedding + 1
    if only_head:
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("equal", "only_head"), [(True, False), (False, False), (True, True)])
def test_a_tied_weight_that_is_saved_under_both_names(
    equal: bool, only_head: bool, saved: Save, tmp_path: Path
) -> None:
    both_names(saved("llama-tied", "1GB"), tmp_path / "both", equal=equal, only_head=only_head)
    arguments = {"num_labels": 3, "pad_token_id": 0}
    for cls, more in ((AutoModelForCausalLM, {}), (AutoModelForSequenceClassification, arguments)):
        torch.manual_seed(5)
        plain = cls.from_pretrained(tmp_path / "both", **more)
        torch.manual_seed(5)
        ours = from_pretrained(cls, tmp_path / "both", options(tmp_path), **more)
        assert bool(names_of_ties(plain)) == (equal and cls is AutoModelForCausalLM)
        assert_same_model(ours, plain)
        close(ours)


def test_subfolder_and_variant(saved: Save, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved("llama"))
    model.save_pretrained(tmp_path / "repository" / "sub", variant="half", max_shard_size="60KB")
    where: dict[str, Any] = {"subfolder": "sub", "variant": "half"}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "repository", **where)
    ours = from_pretrained(AutoModelForCausalLM, tmp_path / "repository", options(tmp_path), **where)
    assert_same_model(ours, plain)
    close(ours)


def test_a_model_class_will_do(saved: Save, tmp_path: Path) -> None:
    ours = from_pretrained(transformers.LlamaForCausalLM, str(saved("llama")), options(tmp_path))
    assert_same_model(ours, AutoModelForCausalLM.from_pretrained(saved("llama")))
    close(ours)


def test_the_model_outlives_its_checkpoint(saved: Save, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(saved("bert"), directory)
    plain = ENTRIES["bert"].build(seed=3).eval()
    plain.load_state_dict(AutoModelForMaskedLM.from_pretrained(saved("bert")).state_dict())
    ours = from_pretrained(AutoModelForMaskedLM, directory, options(tmp_path, 8 << 20))
    for file in directory.glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    mine = ours.state_dict()
    assert all(same_bits(mine[name], value) for name, value in plain.state_dict().items())
    close(ours)


def test_transformers_is_as_before(saved: Save, tmp_path: Path) -> None:
    setter, move = (
        core_model_loading.set_param_for_module,
        transformers.PreTrainedModel._move_missing_keys_from_meta_to_device,
    )
    seen: list[tuple[Any, str | None]] = []

    class Watching(AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            seen.append((core_model_loading.set_param_for_module, os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")))
            return super().from_pretrained(*args, **kwargs)

    close(from_pretrained(Watching, saved("llama"), options(tmp_path)))
    assert seen[0][0] is not setter
    assert seen[0][1] == "1"
    assert core_model_loading.set_param_for_module is setter
    assert transformers.PreTrainedModel._move_missing_keys_from_meta_to_device is move
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


def test_another_thread_reads_a_plain_model_meanwhile(saved: Save, tmp_path: Path) -> None:
    found: list[nn.Module] = []

    class Meanwhile(AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            load = lambda: found.append(AutoModelForCausalLM.from_pretrained(saved("gpt2")))  # noqa: E731
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
            return super().from_pretrained(*args, **kwargs)

    ours = from_pretrained(Meanwhile, saved("llama"), options(tmp_path))
    assert engine_of(found[0]) is None
    assert not any(p.isnan().any() for p in found[0].parameters())
    close(ours)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"device_map": "auto"},
            r"does not take device_map='auto': the budgets decide where parameters are; set host_memory",
        ),
        ({"gguf_file": "a.gguf"}, r"does not take gguf_file='a.gguf': only safetensors can be read onto pages"),
        ({"load_in_8bit": True}, r"does not take load_in_8bit=True: quantised parameters cannot be put on pages"),
        ({"tp_plan": "auto"}, r"does not take tp_plan='auto': .* set shard: full to cut layers over processes\."),
        ({"tp_size": 2}, r"does not take tp_size=2: tensor and expert parallelism are not there; "),
        # Expert parallelism is asked for by it as well.
        (
            {"distributed_config": DistributedConfig()},
            r"(?s)does not take distributed_config=DistributedConfig",
        ),
        ({"use_safetensors": False}, r"does not take use_safetensors=False: other formats can only be read whole"),
    ],
)
def test_arguments_that_contradict_pages(kwargs: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        from_pretrained(AutoModelForCausalLM, tmp_path, **kwargs)


@pytest.mark.parametrize("call", [from_pretrained, from_config])
def test_a_class_that_is_left_out(call: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        call("my-model", options(tmp_path))
    assert str(caught.value) == (
        "'my-model' is a str, and not the class of a model. Give the class first, such as "
        "from_pretrained(AutoModelForCausalLM, id_or_path, ptm_config)."
    )


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Path], None], message: str, saved: Save, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(saved("llama"), directory)
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        from_pretrained(AutoModelForCausalLM, directory, options(tmp_path))
    ours = from_pretrained(AutoModelForCausalLM, saved("llama"), options(tmp_path))
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_weights(ours, directory)
    assert all(same_bits(value, before[name]) for name, value in ours.state_dict().items())
    close(ours)


def test_damage_that_shows_while_reading(saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with files of the Hub's cache, which are not looked at before."""
    directory = tmp_path / "model"
    shutil.copytree(saved("llama"), directory)
    truncate_a_shard(directory)
    monkeypatch.setattr("ptm_accel.integrations.transformers.loading._check_directory", lambda directory, kwargs: None)
    memory = open_memory("host+disk", 2_000_000, tmp_path)
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+.safetensors \(\S+ \S+\) is damaged: "):
        from_pretrained(AutoModelForCausalLM, directory, config(), memory=memory)
    assert memory.closed
    unknown = _damaged("a/model", SafetensorError("invalid header"))
    assert str(unknown) == "the weights of a/model are damaged: invalid header. Download the model again."


def test_a_budget_below_the_floor_is_refused_before_anything_is_read(saved: Save, tmp_path: Path) -> None:
    memory = open_memory("host+disk", 100_000, tmp_path)
    with pytest.raises(BudgetError, match="this model cannot train under less than"):
        from_pretrained(
            AutoModelForCausalLM, saved("llama-tied"), {"host_memory": 100_000, "page_size": PAGE}, memory=memory
        )
    assert memory.pool.stats.stored_bytes == 0
    assert memory.closed


def test_the_floor_of_a_tied_model_counts_its_weight_once(saved: Save, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved("llama-tied"))
    engine = Engine.attach(plain, config(), memory=open_memory("host+disk", 8 << 20, tmp_path))
    whole = engine.needs.floor.whole_bytes
    engine.detach()
    exact = {"host_memory": whole, "page_size": PAGE}
    ours = from_pretrained(AutoModelForCausalLM, saved("llama-tied"), exact)
    close(ours)


def test_a_checkpoint_of_another_model_does_not_fill_the_memory(saved: Save, tmp_path: Path) -> None:
    other = ENTRIES["llama"].build().config  # type: ignore[union-attr]
    other.hidden_size, other.intermediate_size, other.num_hidden_layers = 64, 4096, 8
    with pytest.raises(BudgetError, match=r"cannot place .* for \d+ parameters that the checkpoint lacks"):
        from_pretrained(AutoModelForCausalLM, saved("vit"), {**options(tmp_path), "host_memory": "8MiB"}, config=other)


ROOT = Path(__file__).resolve().parents[2]
MEASURED = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from ptm_accel.integrations.transformers.loading import from_config, from_pretrained, load_weights
from ptm_accel.engine import engine_of
from tests.anonymous_memory import Peak

config = LlamaConfig(vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                     num_attention_heads=8, num_key_value_heads=8)
where = Path(sys.argv[1])
options = {"host_memory": "128MiB", "disk": str(where)}
torch.manual_seed(0)
with Peak() as building:
    model = from_config(AutoModelForCausalLM, config, options)
nbytes = sum(p.nbytes for p in model.parameters())
largest = max(p.nbytes for p in model.parameters())
model.save_pretrained(where / "model", max_shard_size="100MB")
probe = model.state_dict()["model.layers.5.mlp.up_proj.weight"][:2].clone()
with Peak() as writing:
    load_weights(model, where / "model")
engine_of(model).close()
del model
peaks = {"building": building.grown, "writing": writing.grown}
for dtype in (torch.float32, torch.float64):
    with Peak() as reading:
        model = from_pretrained(AutoModelForCausalLM, where / "model", options, dtype=dtype)
    found = model.state_dict()["model.layers.5.mlp.up_proj.weight"][:2]
    assert torch.equal(found, probe.to(dtype))
    peaks[str(dtype)] = reading.grown
    del found
    engine_of(model).close()
    del model
print(json.dumps({"nbytes": nbytes, "largest": largest, **peaks}))
"""


def test_no_more_than_the_budget_and_one_tensor_is_ever_in_memory(tmp_path: Path) -> None:
    done = run_prepared("-c", MEASURED, tmp_path, cwd=ROOT)
    assert done.code == 0, done.err
    measured = json.loads(done.out)
    budget = 128 << 20
    assert measured["nbytes"] > 3 * budget
    for what, tensors in (("building", 1), ("writing", 1), ("torch.float32", 1), ("torch.float64", 3)):
        limit = 1.05 * (budget + tensors * measured["largest"])
        assert measured[what] < limit, f"{what}: {measured[what] / 2**20:.0f} MiB of {limit / 2**20:.0f}"


def test_an_adapter_is_put_into_a_base_that_has_its_values(saved: Save, tmp_path: Path) -> None:
    """DoRA begins with the norms of the base's weights."""
    base = AutoModelForCausalLM.from_pretrained(saved("llama"))
    adapted = get_peft_model(base, LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "down_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    before = {name: inspect.getattr_static(PreTrainedModel, name) for name in dir(PreTrainedModel)}
    ours = from_pretrained(AutoModelForCausalLM, tmp_path / "adapter", options(tmp_path))
    assert {name: inspect.getattr_static(PreTrainedModel, name) for name in dir(PreTrainedModel)} == before
    engine = engine_of(ours)
    assert engine is not None
    assert all(engine.slots.of(param) is not None for param in ours.parameters())
    assert "model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight" in ours.state_dict()
    assert_same_model(ours, plain)
    close(ours)


def test_what_is_larger_than_memory_is_read_onto_pages_by_an_unchanged_script(saved: Save, tmp_path: Path) -> None:
    wanted = PTMConfig.load(options(tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(saved("llama"))
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    plain.config.save_pretrained(tmp_path)
    nbytes = sum(param.nbytes for param in plain.parameters())
    stock = transformers.LlamaForCausalLM.from_pretrained
    for directory in (saved("llama"), tmp_path):
        ours = read_if_too_large(stock, wanted, nbytes - 1, directory)
        assert_same_model(ours, stock(directory))
        close(ours)
    for host_bytes, more in ((nbytes, {}), (0, {"device_map": "cpu"})):
        ordinary = read_if_too_large(stock, wanted, host_bytes, saved("llama"), **more)
        assert engine_of(ordinary) is None
        assert_same_model(ordinary, plain)


def test_pages_that_are_asked_for_are_those_of_the_call(saved: Save, tmp_path: Path) -> None:
    class Within(AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return read_if_too_large(super().from_pretrained, PTMConfig(), 0, *args, **kwargs)

    memory = open_memory("host+disk", 2_000_000, tmp_path)
    ours = from_pretrained(Within, saved("llama"), config(), memory=memory)
    engine = engine_of(ours)
    assert engine is not None
    assert engine.memory is memory
    close(ours)
