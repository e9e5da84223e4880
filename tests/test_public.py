"""What is public stays as it is: names and signatures that scripts rely on. A change here belongs into CHANGELOG.md."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from typer.main import get_command

import ptm_accel
from ptm_accel import cli, config, environment, estimate


def _signature(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(
        f"{'*' * (p.kind is p.VAR_POSITIONAL) + '**' * (p.kind is p.VAR_KEYWORD)}{p.name}"
        f"{'=' if p.default is not p.empty else ''}{'!' if p.kind is p.KEYWORD_ONLY else ''}"
        for p in parameters
    )


SIGNATURES = {
    "enable": "ptm_config=",
    "disable": "",
    "engine_of": "model",
    "from_config": "auto_cls, config, ptm_config=, memory=!, **kwargs",
    "from_pretrained": "auto_cls, id_or_path, ptm_config=, memory=!, **kwargs",
    "gathered": "model, grads=!, write=!",
    "plain_copy": "model",
}
"""`=` has a default, `!` can only be given by name."""

METHODS = {
    "attach": "model, config=, memory=!, device=!, evaluates=!",
    "bind_optimizer": "self, optimizer",
    "clip_grad_norm_": "self, max_norm, norm_type=, error_if_nonfinite=!, parameters=!",
    "zero_grad": "self",
    "detach": "self, check=!",
    "close": "self",
    "settle": "self",
    "check_integrity": "self",
}


def test_the_names() -> None:
    classes = {"Engine", "PTMConfig", "Trainer", "__version__"}
    assert set(ptm_accel.__all__) == classes | SIGNATURES.keys()
    assert all(hasattr(ptm_accel, name) for name in ptm_accel.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions(name: str) -> None:
    assert _signature(getattr(ptm_accel, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_engine(name: str) -> None:
    assert _signature(getattr(ptm_accel.Engine, name)) == METHODS[name]


def test_the_options() -> None:
    names = [
        "device_memory",
        "host_memory",
        "disk",
        "update",
        "page_size",
        "master_weights",
        "pseudo_to_real",
        "token_slices",
        "pipeline",
        "checkpoint_hashes",
        "shard",
        "micro_batches",
        "max_staleness",
    ]
    assert [field.name for field in dataclasses.fields(config.PTMConfig)] == names
    assert [field.name for field in dataclasses.fields(config.DiskConfig)] == ["paths", "limit", "verify"]
    assert [field.name for field in dataclasses.fields(config.PseudoToRealConfig)] == ["delink", "moments"]
    assert [field.name for field in dataclasses.fields(config.PipelineConfig)] == ["stages"]
    assert set(environment.TEXT_OPTIONS) == {*names, "disk_limit", "disk_verify", "moments", "pipeline_stages"} - {
        "pipeline"
    }


def test_the_command_line() -> None:
    commands = {"check", "config", "doctor", "env", "estimate", "export", "launch", "plan", "slices"}
    assert set(get_command(cli.app).commands) == commands  # type: ignore[attr-defined]


def test_the_adapters() -> None:
    from ptm_accel.integrations import accelerate, transformers

    assert accelerate.__all__ == ["PTMAccelerator", "PagedAcceleratedOptimizer", "PagedGradScaler"]
    assert transformers.__all__ == [
        "PTMCallback",
        "PTMTrainerMixin",
        "PseudoToReal",
        "Trainer",
        "check_version",
        "disable",
        "enable",
        "from_config",
        "from_pretrained",
        "ptm_trainer",
    ]
    assert [field.name for field in dataclasses.fields(estimate.Estimate)] == [
        "parameters",
        "trainable",
        "states_bytes",
        "whole_bytes",
        "least_bytes",
        "reason",
        "below_bytes",
        "pass_bytes",
        "processes",
        "kept",
        "gathered_bytes",
        "network_bytes",
    ]
