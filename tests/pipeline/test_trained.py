"""The Trainer with a pipeline trains as it does without, and leaves checkpoints that anybody can read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file

from ptm_accel.checkpoint.manifest import check_manifest, covered
from tests.pipeline.models import build
from tests.prepared import Run, run_prepared, run_ranks

CHILD = Path(__file__).with_name("trained_child.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PAGES = {"host_memory": "192KiB", "page_size": 4096}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}


def plain(folder: Path, **asked: Any) -> dict[str, Any]:
    run = run_prepared(CHILD, json.dumps({**asked, "out": str(folder / "plain")}), cwd=folder, env=ENVIRONMENT)
    return result(run)


def staged(folder: Path, stages: int, count: int | None = None, options: Any = None, **asked: Any) -> list[Run]:
    given = {"out": str(folder / "staged"), **asked, "options": {"pipeline": {"stages": stages}} | (options or {})}
    return run_ranks(CHILD, json.dumps(given), count=count or stages, cwd=folder, env=ENVIRONMENT)


def result(run: Run) -> dict[str, Any]:
    assert run.code == 0, run.err[-4000:]
    found: dict[str, Any] = json.loads(run.result.removeprefix("RESULT "))
    return found


def check_alike(folder: Path, expected: dict[str, Any], runs: list[Run]) -> None:
    """Losses, norms, evaluation and weights are those of the run without a pipeline."""
    for run in runs:
        found = result(run)
        ours, theirs = (torch.tensor(each["logged"]).unbind(1) for each in (found, expected))
        assert torch.allclose(ours[0], theirs[0], rtol=1e-5, atol=0), "losses"
        assert torch.allclose(ours[1], theirs[1], rtol=2e-5, atol=0), "norms"
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
    check_weights(folder / "plain" / "last", folder / "staged" / "last")


def check_weights(plain_at: Path, staged_at: Path) -> None:
    wanted = load_file(plain_at / "model.safetensors")
    index = json.loads((staged_at / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert index.keys() == wanted.keys()
    for name, tensor in wanted.items():
        found = load_file(staged_at / index[name])[name]
        assert torch.allclose(found, tensor, rtol=1e-4, atol=1e-5), name
    # As anybody reads it.
    read = transformers.AutoModelForCausalLM.from_pretrained(staged_at)
    for name, tensor in read.state_dict().items():
        if name in wanted:
            assert torch.allclose(tensor, wanted[name].to(tensor.dtype), rtol=1e-4, atol=1e-5), name


PADDED = {"padded": True, "cut": False, "arguments": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.2}}
THIRDS = {"gradient_checkpointing": True, "gradient_accumulation_steps": 3, "average_tokens_across_devices": False}
READ = {"padded": True, "reads": True, "evaluates_first": True, "options": PAGES}


@pytest.mark.parametrize(
    ("kind", "stages", "more"),
    [
        ("qwen3", 2, {**READ, "arguments": {"gradient_checkpointing": True, "max_grad_norm": 0.0}}),
        pytest.param("llama", 2, PADDED, marks=pytest.mark.process),
        pytest.param("gpt2", 3, {"arguments": THIRDS}, marks=pytest.mark.process),
        pytest.param("llama", 2, {"arguments": {"bf16": True}}, marks=pytest.mark.process),
        pytest.param("gpt2", 2, {"dtype": "bfloat16"}, marks=pytest.mark.process),
    ],
)
def test_trains_as_without(kind: str, stages: int, more: dict[str, Any], tmp_path: Path) -> None:
    more = dict(more)
    options = more.pop("options", {})
    expected = plain(tmp_path, kind=kind, **more)
    if options:
        options = {**options, "disk": str(tmp_path)}
    runs = staged(tmp_path, stages, options=options, kind=kind, **more)
    tolerance = 2e-2 if "dtype" in more or more.get("arguments", {}).get("bf16") else 0.0
    if tolerance:
        for run in runs:
            found = torch.tensor(result(run)["logged"])
            assert torch.allclose(found, torch.tensor(expected["logged"]), rtol=tolerance)
    else:
        check_alike(tmp_path, expected, runs)


@pytest.mark.process
def test_replicas_have_batches_of_their_own(tmp_path: Path) -> None:
    """Two pipelines train as two processes with the whole model do (DistributedDataParallel)."""
    given: dict[str, Any] = {"kind": "llama", "padded": True}
    asked = json.dumps({**given, "out": str(tmp_path / "plain")})
    expected = result(run_ranks(CHILD, asked, count=2, cwd=tmp_path, env=ENVIRONMENT)[0])
    check_alike(tmp_path, expected, staged(tmp_path, 2, 4, **given))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of five steps in two stages that saves: what it tells, and its folder, which nobody changes."""
    folder = tmp_path_factory.mktemp("whole")
    first, second = map(result, staged(folder, 2, kind="llama", arguments=SAVING))
    assert first == second
    return first, folder / "staged"


@pytest.mark.process
def test_resumes(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    expected, folder = whole
    shutil.copytree(folder, tmp_path / "staged")
    checkpoint = tmp_path / "staged" / "checkpoint-2"
    # The files of all stages are covered.
    assert [*(check_manifest(checkpoint) or ())] == covered(checkpoint)
    assert "stage-1-of-2/optimizer-00001-of-00001.safetensors" in covered(checkpoint)
    again = staged(tmp_path, 2, kind="llama", arguments=SAVING, resume=str(checkpoint), out=str(tmp_path / "again"))
    for run in again:
        # Of equal cuts the same bits come. (Runs that measure may cut otherwise.)
        assert result(run) == expected
    for file in (tmp_path / "staged" / "last").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / "last" / file.name).read_bytes()
    # One process compares for all.
    shard = checkpoint / "stage-1-of-2" / "optimizer-00001-of-00001.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    for run in staged(tmp_path, 2, kind="llama", arguments=SAVING, resume=str(checkpoint)):
        assert run.code != 0
        assert f"{shard} is damaged" in run.err
        assert f"The newest whole one beside it is {checkpoint.parent / 'checkpoint-5'}." in run.err


@pytest.mark.process
def test_a_checkpoint_is_for_as_many_stages(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    checkpoint = str(whole[1] / "checkpoint-2")
    for run in staged(tmp_path, 3, kind="llama", resume=checkpoint):
        assert run.code != 0
        assert "was saved by a pipeline of 2 stages" in run.err
        assert "set pipeline.stages to 2 to go on with it" in run.err
    given = {"kind": "llama", "out": str(tmp_path / "whole"), "options": {}, "resume": checkpoint}
    run = run_prepared(CHILD, json.dumps(given), cwd=tmp_path, env=ENVIRONMENT)
    assert run.code != 0
    assert "was saved by a pipeline of 2 stages" in run.err
    given = {**given, "resume": None, "arguments": {**SAVING, "max_steps": 2}}
    result(run_prepared(CHILD, json.dumps(given), cwd=tmp_path, env=ENVIRONMENT))
    for run in staged(tmp_path, 2, kind="llama", resume=str(tmp_path / "whole" / "checkpoint-2")):
        assert run.code != 0
        assert "was saved by a training without pipeline" in run.err
        assert "leave pipeline out to go on with it" in run.err


@pytest.mark.process
def test_weights_alone(tmp_path: Path) -> None:
    """Saved without optimizer state, where an older model lies; training goes on from them with a new optimizer."""
    build("llama").float().save_pretrained(tmp_path / "staged" / "last")
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "save_only_model": True}
    for run in staged(tmp_path, 2, kind="llama", arguments=saving):
        result(run)
    assert not (tmp_path / "staged" / "last" / "model.safetensors").exists()
    for run in staged(tmp_path, 2, kind="llama", arguments={**saving, "max_steps": 3}, resume=True):
        result(run)
        assert "only its weights are loaded, and training continues with a new optimizer" in run.err


@pytest.mark.process
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_failed_rank_ends_all_and_the_last_checkpoint_resumes(
    how: str, whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    given = {"kind": "llama", "arguments": SAVING}
    if how == "raise":
        # Without a launcher, which would end the other.
        first, second = staged(tmp_path, 2, **given, fails=how)
        codes, said = [first.code, second.code], second.err
    else:
        code, said = launched({**given, "out": str(tmp_path / "staged"), "options": {"pipeline": 2}, "fails": how})
        codes = [code]
    assert time.monotonic() - float((tmp_path / "staged" / "failed").read_text()) < 60
    assert all(codes)
    assert ("rank 1: RuntimeError('something is wrong')" if how == "raise" else "SIGKILL") in said
    ours = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert not ours
    found = {result(run)["evaluated"] for run in staged(tmp_path, 2, **given, resume=True)}
    assert found == {whole[0]["evaluated"]}


def launched(asked: dict[str, Any]) -> tuple[int, str]:
    """Two processes that torchrun starts: its exit status, and what all complained about."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(CHILD)]
    done = subprocess.run(
        [*command, json.dumps(asked)],
        env={**ENVIRONMENT, "PYTHONPATH": str(CHILD.parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stderr
