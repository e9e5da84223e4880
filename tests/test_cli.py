"""The command line beside accelerate's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ptm_accel.integrations.accelerate import launching
from transformers import BertConfig, LlamaConfig, ViTConfig
from typer.main import get_command
from typer.testing import CliRunner

import ptm_accel
from ptm_accel import __main__, cli, config, speeds
from ptm_accel.checkpoint.training_state import save_optimizer_state
from ptm_accel.commands import configuring, environment
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.environment import from_environment
from ptm_accel.errors import BudgetError, CheckpointError, ConfigError
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.speeds import Speeds
from tests.figures import FIGURE
from tests.prepared import run_prepared

RUNNER = CliRunner()


def test_env_tells_what_a_report_needs() -> None:
    shown = RUNNER.invoke(cli.app, ["env"])
    assert shown.exit_code == 0
    told = json.loads(RUNNER.invoke(cli.app, ["env", "--json"]).output)
    assert told["torch"] == torch.__version__
    assert re.fullmatch(r"[\d.]+ GiB \((cgroup v[12] limit|physical memory)\)", told["host memory"])
    assert all(name in shown.output for name in told)
    assert environment.environment_report().keys() == told.keys()


def test_options_are_shown_with_underscores_and_read_with_hyphens_too() -> None:
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    options = {name: [opt for param in command.params for opt in param.opts] for name, command in commands.items()}
    assert "--batch_size" in options["estimate"]
    for name, known in options.items():
        assert len(known) == len(set(known))
        for option in (known_option for known_option in known if known_option.startswith("--")):
            assert "-" not in option[2:]
            for spelled in {option, "--" + option[2:].replace("_", "-")}:
                assert "No such option" not in RUNNER.invoke(cli.app, [name, spelled]).output
    assert all("--json" in options[name] for name in ("env", "doctor", "estimate", "slices", "check", "export"))


@pytest.mark.parametrize("name", ["env", "doctor", "slices", "config", "export", "check"])
def test_help_has_an_example(name: str) -> None:
    shown = RUNNER.invoke(cli.app, [name, "--help"])
    assert shown.exit_code == 0
    assert re.search(rf"^\s*ptm-accel {name}\b", shown.output, re.MULTILINE)


def test_the_version_is_told() -> None:
    shown = RUNNER.invoke(cli.app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"ptm-accel {ptm_accel.__version__}\n")


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model"])
def test_a_directory_that_is_not_there_is_no_model_of_the_hub(path: str) -> None:
    found = RUNNER.invoke(cli.app, ["estimate", path])
    assert isinstance(found.exception, ConfigError)
    assert str(found.exception) == f"no such directory: {path}. Give a model id, or a directory with a config.json."


@pytest.mark.parametrize("option", ["--batch_size", "--length", "--processes"])
@pytest.mark.parametrize("number", ["0", "-5", "two"])
def test_a_batch_of_nothing_is_refused(option: str, number: str) -> None:
    found = RUNNER.invoke(cli.app, ["estimate", "./no-such-model", option, number])
    assert found.exit_code == 2, "the model is not even looked for"
    assert option in found.output


def test_a_package_that_is_not_there() -> None:
    assert environment._version("no-such-package") == "not installed"


def test_the_questionnaire_writes_the_section(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "config.yaml"
    answers = ["lots", "8GB", "", f" ,\n{tmp_path}", "blocking", "fp32", "full"]
    found = RUNNER.invoke(cli.app, ["config", "--config_file", str(file)], input="\n".join(answers) + "\n")
    assert found.exit_code == 0, found.output
    assert "host_memory: " in found.output, "an answer that cannot be used is asked for again"
    assert "names no folder; write disk: /mnt/ssd" in found.output
    written = yaml.safe_load(file.read_text())
    assert written["ptm_config"] == {
        "host_memory": "8GB",
        "disk": [str(tmp_path)],
        "update": "blocking",
        "master_weights": "fp32",
        "shard": "full",
    }
    assert PTMConfig.load(file) == PTMConfig.load(written["ptm_config"])
    assert written["distributed_type"] == "NO"


def test_what_the_file_says_already_stays(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nptm_config: {host_memory: 1GB}\n")
    configuring.write_section(file, configuring.read_config(file), {"update": "exact"})
    assert yaml.safe_load(file.read_text()) == {
        "distributed_type": "MULTI_GPU",
        "num_processes": 4,
        "ptm_config": {"update": "exact"},
    }


@pytest.mark.parametrize(
    ("text", "message"), [("[", "not valid YAML: .*; correct that line"), ("- 1\n", "not a mapping")]
)
def test_another_file_is_left_alone(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        configuring.read_config(file)
    assert file.read_text() == text
    with pytest.raises(ConfigError, match=r"config.yaml/sub.yaml: cannot be written: .*; name another file"):
        configuring.write_section(file / "sub.yaml", {}, {})


def test_errors_are_one_line(tmp_path: Path) -> None:
    done = run_prepared("-m", "ptm_accel.cli", "export", tmp_path, cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith("ptm-accel: error: ")
    assert "has no optimizer state" in done.err
    assert "Traceback" not in done.err


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    found = RUNNER.invoke(cli.app, ["export", str(tmp_path / "nowhere")])
    assert isinstance(found.exception, CheckpointError)
    assert str(found.exception) == f"no such directory: {tmp_path / 'nowhere'}. Give the path of a checkpoint."


def test_export_writes_what_torch_reads(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    engine = Engine.attach(model, PTMConfig(host_memory="8MiB"), device=torch.device("cpu"))
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    save_optimizer_state(optimizer, tmp_path)
    engine.close()
    assert RUNNER.invoke(cli.app, ["export", str(tmp_path)]).exit_code == 0
    found = RUNNER.invoke(cli.app, ["export", str(tmp_path)])
    assert found.exit_code == 0, "an earlier export may be written over"
    torch.optim.AdamW(torch.nn.Linear(8, 8).parameters()).load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert RUNNER.invoke(cli.app, ["export", str(tmp_path), "--output", str(tmp_path / "optimizer.bin")]).exit_code == 0
    assert (tmp_path / "optimizer.bin").stat().st_size > 3 * 8 * 8 * 4

    later = tmp_path / "optimizer.pt"
    exported = later.read_bytes()
    later.write_bytes(b"of a plain run that went on from here")
    saved_ns = (tmp_path / "optimizer.json").stat().st_mtime_ns
    os.utime(later, ns=(saved_ns, saved_ns + 1))
    found = RUNNER.invoke(cli.app, ["export", str(tmp_path)])
    assert isinstance(found.exception, CheckpointError)
    assert str(found.exception).startswith(
        f"{later} was saved after the state in {tmp_path} that would be written over"
    )
    assert later.read_bytes() == b"of a plain run that went on from here"
    assert RUNNER.invoke(cli.app, ["export", str(tmp_path), "--force"]).exit_code == 0
    assert later.read_bytes() == exported


@pytest.mark.process
def test_a_script_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    (tmp_path / "script.py").write_text(
        "import os, sys, beside\n"
        "assert __name__ == '__main__'\n"
        "print(sys.argv[1:], beside.value, os.environ['PTM_HOST_MEMORY'], os.environ['ACCELERATE_USE_PTM'])\n"
        "os._exit(0)\n"
    )
    for script in (["script.py"], ["-m", "script"]):
        done = subprocess.run(
            [sys.executable, "-m", "ptm_accel", "--ptm_host_memory", "1GB", *script, "--lr", "1"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.stdout == "['--lr', '1'] 7 1GB true\n", done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL. Memory may have run out"),
    ],
)
def test_a_script_that_fails_ends_launch_with_its_status(code: str, status: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(code)
    # What is started is a python that runs the script and nothing else: how it ends is all that counts.
    done = subprocess.run(
        [sys.executable, "-m", "ptm_accel.cli", "launch", "--cpu", "--no_python", sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert done.stderr.count("Traceback") == ("Error" in said)


def test_the_status_is_the_one_that_a_shell_would_tell(capsys: pytest.CaptureFixture[str]) -> None:
    assert launching.tell_of_end(subprocess.CalledProcessError(7, "script"), "ptm-accel launch") == 7
    assert capsys.readouterr().err == ""
    assert launching.tell_of_end(subprocess.CalledProcessError(-15, "script"), "ptm-accel launch") == 143
    assert capsys.readouterr().err == "ptm-accel launch: the script was ended by SIGTERM.\n"


def test_flags_go_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.touch()
    for name, value in {"ACCELERATE_USE_PTM": "1", "PTM_HOST_MEMORY": "1GB", "PTM_UPDATE": "blocking"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PTM_PAGE_SIZE", "PTM_SHARD", "PTM_CHECKPOINT_HASHES", "PTM_MICRO_BATCHES"):
        # It is told with its default, and taken away again after this test.
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(__main__, "_run", lambda *given: None)
    __main__.main(["--ptm_host_memory", "2GB", str(script)])
    assert from_environment(os.environ) == PTMConfig(host_memory="2GB", update="blocking")


def test_options_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--ptm_host_memory", "lots", "script.py"])
    assert ended.value.code == 2
    assert "host_memory: " in capsys.readouterr().err
    assert from_environment({}) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--ptm_host_memry", "1GB", "script.py"],
            "unknown flag --ptm_host_memry; did you mean --ptm_host_memory?\n",
        ),
        (["--use_ptm", "script.py"], "--use_ptm is a flag of accelerate launch; here pages are switched on without"),
        (
            ["script.py", "--ptm_host_memory", "1GB"],
            "--ptm_host_memory comes after the script script.py, and would",
        ),
        (["no-such-script.py"], "there is no script no-such-script.py; name one, or a module after -m."),
        ([], "the following arguments are required: script\n"),
    ],
)
def test_mistakes_at_the_entry_point(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    monkeypatch.setattr(__main__, "_run", lambda *given: pytest.fail(f"started: {given}"))
    before = dict(os.environ)
    with pytest.raises(SystemExit) as ended:
        __main__.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert os.environ == before


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
            "What a batch holds is worked out for text only, and ViTForImageClassification takes pixel_values: call",
        ),
        (
            BertConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
            "BertForMultipleChoice does not take the batch of text that was made up (",
        ),
    ],
    ids=["images", "text of another shape"],
)
def test_the_estimate_of_a_model_that_takes_something_else(config: Any, said: str, tmp_path: Path) -> None:
    config.architectures = [said.split(" takes ")[0].split()[-1] if "takes" in said else said.split()[0]]
    config.save_pretrained(tmp_path)
    found = RUNNER.invoke(cli.app, ["estimate", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert "not known beforehand" in found.output
    assert said in found.output


# ---- plan ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def layered(tmp_path: Path) -> Path:
    """A model of eight layers of 0.8 MB."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=8, num_attention_heads=4, vocab_size=256
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "disk").mkdir()
    return tmp_path


@pytest.fixture
def given_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is known; without a disk there is nowhere to go, as on the real one."""
    known = Speeds(flops=1e11, disk=LinkRates(1e9, 1e9, 2e9), update_params=1e8)
    monkeypatch.setattr(speeds, "measured_speeds", lambda device, dtype, disk, **how: known if disk else None)


def planned(folder: Path, *more: str) -> str:
    given = ["plan", str(folder / "model"), "--disk", str(folder / "disk"), "--page_size", "4096", *more]
    found = RUNNER.invoke(cli.app, given)
    assert found.exit_code == 0, found.output
    return re.sub(r"\s+", " ", found.output)


def test_the_plan_of_a_model(layered: Path) -> None:
    roomy, tight = (planned(layered, "--host_memory", size) for size in ("200MiB", "4MiB"))
    assert "parameters that stay model.layers.0-7" in roomy
    assert "that leave none" in roomy
    assert "moved in and out 0 B, 0 B" in roomy
    assert "step (forecast)" in tight
    assert re.search(r"that leave .*model\.layers\.[\d,-]+", tight)
    assert re.search(r"optimizer state that stays .* of ", tight)
    assert re.search(r"with update: lock_free [\d.]+ (us|ms|s) at best", tight)
    assert "lock_free" not in roomy, "nothing has to be waited for"


@pytest.mark.usefixtures("given_speeds")
def test_the_plan_on_a_device_tells_how_many_micro_batches_fit(layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = config.resolve
    kept = "kept with micro_batches: by_layer 1.12 MiB for each micro-batch of a step"
    given = ("--batch_size", "2", "--length", "128", "--checkpointing")
    assert planned(layered, "--host_memory", "200MiB", *given).endswith(f"{kept} ")
    for mib, fits in ((8, 2), (32, 21)):
        monkeypatch.setattr(
            config, "resolve", lambda asked, mib=mib, **how: replace(resolve(asked, **how), device_bytes=mib << 20)
        )
        assert planned(layered, *given).endswith(f"{kept}; at most {fits} fit device_memory together ")


@pytest.mark.usefixtures("given_speeds")
def test_a_plan_that_cannot_be_is_refused_with_a_figure_that_works(layered: Path) -> None:
    given = ["plan", str(layered / "model"), "--disk", str(layered / "disk"), "--page_size", "4096"]
    refused = RUNNER.invoke(cli.app, [*given, "--host_memory", "128KiB"])
    assert isinstance(refused.exception, BudgetError)
    least = re.search(rf"give at least {FIGURE}\.", str(refused.exception))
    assert least is not None, refused.exception
    assert RUNNER.invoke(cli.app, [*given, "--host_memory", least[1]]).exit_code == 0
    without = RUNNER.invoke(cli.app, ["plan", str(layered / "model"), "--host_memory", "1GiB"])
    assert isinstance(without.exception, ConfigError)
    assert "give --disk a folder" in str(without.exception)
    other = RUNNER.invoke(cli.app, [*given, "--dtype", "int8"])
    assert "dtype: 'int8' is unknown" in str(other.exception)


# ---- slices ----------------------------------------------------------------------------------------------------------


def test_the_slices_of_a_pipeline(layered: Path) -> None:
    given = ["slices", str(layered / "model"), "--length", "128", "--stages", "4", "--batch-size", "2"]
    found = RUNNER.invoke(cli.app, given)
    assert found.exit_code == 0, found.output
    text = re.sub(r"\s+", " ", found.output)
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    times = [re.search(rf"{name} ([\d.]+) (us|ms|s)\b", text) for name in ("a step", "by rows alone", "in one piece")]
    step, rows, whole = (float(each[1]) * units[each[2]] for each in times if each is not None)
    assert step <= rows <= whole
    parts = re.findall(r"(\d+) x \[([\d, ]+)\]", text)
    assert sum(int(size) for size, _ in parts) == 2
    assert all(sum(map(int, tokens.split(","))) == 128 for _, tokens in parts)
    told = json.loads(RUNNER.invoke(cli.app, [*given, "--json"]).output)
    assert sum(part["rows"] for part in told["parts"]) == 2
    assert all(sum(part["tokens"]) == 128 for part in told["parts"])
    assert 0 < told["bound_s"] <= told["step_s"] <= told["rows_s"] <= told["whole_s"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--length", "128", "--stages", "9"], "9 stages of 8 layers; set it to at most 8"),
        (["--length", "40", "--stages", "2"], "40 tokens are too few to be cut; give 64 at least"),
    ],
)
def test_slices_that_cannot_be(more: list[str], said: str, layered: Path) -> None:
    found = RUNNER.invoke(cli.app, ["slices", str(layered / "model"), *more])
    assert isinstance(found.exception, ConfigError)
    assert said in str(found.exception)
