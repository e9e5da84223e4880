"""The examples run in small, as a person starts them: in a process of their own, in a folder of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.prepared import run_prepared, run_ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TEXT = "\n".join(f"def function_{i}(argument): return argument + {i}" for i in range(200))


def _run(script: str, *arguments: str, cwd: Path, fails: bool = False) -> str:
    # Without a GPU, so that the same figures come out wherever the tests run.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "warning"}
    done = run_prepared(EXAMPLES / script, *arguments, cwd=cwd, env=environment)
    text = done.out + done.err
    assert (done.code != 0) == fails, text
    return text


def _module(name: str) -> ModuleType:
    """An example as a module, for its parts."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


def _runs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    paged, plain = (json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("paged", "plain"))
    return paged, plain


def test_pretraining_compares_itself_with_plain(tmp_path: Path) -> None:
    # The two commands that `--small` alone runs, which starts a process for the second (`.ci/run` does that).
    _run("pretrain_clm.py", "--small", "--compare_steps", "0", cwd=tmp_path)
    text = _run("pretrain_clm.py", "--small", "--plain", "--stop_after", "4", cwd=tmp_path)
    folder = tmp_path / "outputs" / "pretrain_clm"
    paged, plain = _runs(folder)
    assert "losses           bit-identical" in text
    assert "over the first 4 steps of both" in text
    assert len(paged["losses"]) == 8
    assert paged["losses"][:4] == plain["losses"]
    assert paged["losses"][-1] < paged["losses"][0]
    peak, allowed = paged["tiers"]["host"]
    assert 0 < peak <= allowed < paged["states_bytes"] / 4
    assert paged["tiers"]["disk"][0] > 0, "nothing was paged out"
    assert plain["tiers"] == {}
    # Nothing else is left: the folder with the pages is gone.
    assert {path.name for path in folder.iterdir()} == {"model", "paged.json", "plain.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.num_parameters() * 16 == paged["states_bytes"]


def test_only_runs_with_equal_options_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    compare = _module("pretrain_clm").compare
    run = {
        "settings": {"seed": "1", "data": "a"}, "losses": [3.0, 2.0], "step_s": [1.0, 2.0],
        "rss_peak_bytes": 3 << 20, "rss_before_bytes": 1 << 20,
    }  # fmt: skip
    assert compare(run, {**run, "settings": {"seed": "2", "data": "a"}})
    assert "Not compared with the earlier run: seed differ" in capsys.readouterr().out
    assert compare(run, {**run, "step_s": [1.0, 4.0]})
    text = capsys.readouterr().out
    assert "losses           bit-identical" in text
    assert "2.00 s against 4.00 s: 0.50x" in text
    assert not compare(run, {**run, "losses": [3.0, 2.0000000000000004]})
    text = capsys.readouterr().out
    assert "losses           DIFFERENT" in text
    assert "first at step 2: 2.0 on pages, 2.0000000000000004 plain" in text


@pytest.mark.slow
def test_a_budget_that_cannot_work_is_refused(tmp_path: Path) -> None:
    text = _run("pretrain_clm.py", "--small", "--host_memory", "1MiB", cwd=tmp_path, fails=True)
    assert "cannot train under less than" in text
    assert "model.embed_tokens.weight" in text


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, as a local directory."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<end>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder.parent / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def _finetune(model_folder: Path, cwd: Path, *arguments: str) -> str:
    text_file = model_folder.parent / "text.txt"
    common = [
        str(model_folder), "--text_file", str(text_file), "--sequence_length", "32", "--max_steps", "2",
        "--gradient_accumulation_steps", "2", "--host_memory", "1MiB", "--page_size", "16KiB", "--disk", str(cwd),
    ]  # fmt: skip
    return _run("finetune_clm.py", *common, "--learning_rate", "1e-3", "--output_dir", "out", *arguments, cwd=cwd)


@pytest.mark.process
def test_finetuning_a_directory_in_full(model_folder: Path, tmp_path: Path) -> None:
    text = _finetune(model_folder, tmp_path)
    assert "2 steps; loss" in text
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)


@pytest.mark.process
def test_finetuning_a_directory_with_adapters(model_folder: Path, tmp_path: Path) -> None:
    text = _finetune(model_folder, tmp_path, "--lora", "--lora_rank", "4")
    assert "Saved the LoRA adapter" in text
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any("lora_B" in name and bool(value.abs().sum() > 0) for name, value in adapter.items())


def test_finetuning_refuses_two_sources_of_text() -> None:
    with pytest.raises(SystemExit, match=r"Give either --text_file or --dataset\."):
        _module("finetune_clm").DataArguments(text_file="a.txt", dataset="b").load()


def test_finetuning_refuses_two_sources_of_options() -> None:
    with pytest.raises(SystemExit, match=r"Give --ptm_config or --host_memory, not both\."):
        _module("finetune_clm").PagingArguments(ptm_config="options.yaml", host_memory="1GiB").options()


@pytest.mark.process
def test_the_loop_of_accelerate_gives_the_same_by_the_flag(tmp_path: Path) -> None:
    # As `accelerate launch --cpu --use_ptm` does in the process that it starts (tests/integrations/test_launch.py).
    flags = ["--ptm_host_memory", "10MiB", "--ptm_page_size", "64KiB", "--ptm_disk", str(tmp_path)]
    script = [str(EXAMPLES / "accelerate_loop.py"), "--steps", "3", "--output_dir"]
    said = []
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    for name, before in (("plain", []), ("paged", ["-m", "ptm_accel", *flags])):
        done = run_prepared(*before, *script, tmp_path / name, cwd=tmp_path, env=environment)
        assert done.code == 0, done.err[-3000:]
        said.append([line for line in done.out.splitlines() if line.startswith("step ")])
    assert len(said[0]) == 3
    assert said[0] == said[1]
    plain, paged = (tmp_path / name / "model" / "model.safetensors" for name in ("plain", "paged"))
    assert plain.read_bytes() == paged.read_bytes()


@pytest.mark.process
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "kept without outputs"
    (tmp_path / "notebook.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
    done = run_prepared(tmp_path / "notebook.py", cwd=tmp_path, env=environment)
    assert done.code == 0, done.err[-3000:]
    assert "bit-identical: [" in done.out


@pytest.mark.process
@pytest.mark.thinned(1)
@pytest.mark.parametrize("extra", [[], ["--lora"]])
def test_sft_with_trl(extra: list[str], model_folder: Path, tmp_path: Path) -> None:
    text_file = tmp_path / "notes.txt"
    text_file.write_text("\n\n".join(TEXT.splitlines()[:40]), encoding="utf-8")
    options = ["--host_memory", "1MiB", "--page_size", "16KiB", "--disk", str(tmp_path)]
    common = [str(model_folder), "--text_file", str(text_file), *options, "--max_steps", "2", "--max_length", "32"]
    text = _run("sft_trl.py", *common, "--output_dir", "out", *extra, cwd=tmp_path)
    assert "2 steps; loss" in text
    name = "adapter_model.safetensors" if extra else "model.safetensors"
    assert (tmp_path / "out" / name).is_file()


@pytest.mark.process
def test_layers_share_their_weights_at_first(tmp_path: Path) -> None:
    lines = [_run("pseudo_to_real.py", "--small", *more, cwd=tmp_path) for more in ((), ("--plain",))]
    paged, plain = ([line.split() for line in text.splitlines() if line[:6] in ("shared", "own   ")] for text in lines)
    losses = [[line[2] for line in each] for each in (paged, plain)]
    assert losses[0] == losses[1], "the mean loss of both stages"
    loaded = [float(line[line.index("ptm_loaded_gib") + 1].strip(",")) for line in paged]
    assert loaded[0] * 4 < loaded[1]


@pytest.mark.process
def test_the_pipeline_gives_the_same_losses_by_the_flag(tmp_path: Path) -> None:
    script, environment = EXAMPLES / "token_pipeline.py", {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = run_prepared(script, "--small", cwd=tmp_path, env=environment)
    assert done.code == 0, done.err[-3000:]
    # As `accelerate launch --cpu --num_processes 2 --use_ptm` does in the processes that it starts.
    command = ["-m", "ptm_accel", "--ptm_pipeline_stages", "2", script, "--small"]
    first, second = run_ranks(*command, count=2, cwd=tmp_path, env={**environment, "OMP_NUM_THREADS": "1"})
    assert first.code == second.code == 0, first.err[-3000:] + second.err[-3000:]
    said = [
        [line.split(",")[0] for line in out.splitlines() if line.startswith("step ")] for out in (done.out, first.out)
    ]
    assert len(said[0]) == 3
    assert said[0] == said[1]
    assert "a pipeline of 2 stages takes a batch of 1 x 128 tokens" in first.err
