"""`accelerate launch --use_ptm script.py` with scripts that know nothing of it, beside the same without the flag."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from accelerate.commands import launch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ptm_accel import cli, machine
from ptm_accel.commands import launching
from ptm_accel.config import DiskConfig
from ptm_accel.environment import TEXT_OPTIONS, from_environment
from tests.prepared import Run, run_alone, run_prepared, run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch")
TOLD = {f"PTM_{option.upper()}" for option in (*TEXT_OPTIONS, "config_file")}
OPTIONS = {"host_memory": "2200KB", "page_size": "4096"}
"""What the tiny model's states do not fit; they go to a disk."""


def environment(cwd: Path, **env: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PTM_", "ACCELERATE_", "PYTEST_"))}
    settings = {"HF_HOME": str(cwd / "hf"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    return {**kept, **settings, **env}


def run(*command: str, cwd: Path, **env: str) -> Run:
    """In a process that is started, in which hosts are imported as scripts do that."""
    return run_alone(*command, cwd=cwd, env=environment(cwd, **env))


def run_plain(*command: str, cwd: Path, processes: int = 1) -> Run:
    """Without the flag, as `accelerate launch --cpu` or `torchrun` runs a script; of several processes, the first."""
    env = environment(cwd, ACCELERATE_USE_CPU="true")
    if processes == 1:
        return run_prepared(*command, cwd=cwd, env=env)
    first, *others = run_ranks(*command, count=processes, cwd=cwd, env=env)
    assert all(other.code == 0 for other in others), "".join(other.err[-3000:] for other in others)
    return first


def flags(folder: Path) -> list[str]:
    options = (part for option, text in OPTIONS.items() for part in (f"--ptm_{option}", text))
    return ["--use_ptm", *options, "--ptm_disk", str(folder)]


def environment_of(folder: Path) -> dict[str, str]:
    """What the launcher tells the processes of a script by `flags`."""
    options = {f"PTM_{option.upper()}": text for option, text in OPTIONS.items()}
    return {**options, "PTM_DISK": str(folder), "ACCELERATE_USE_PTM": "true"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: ModuleType) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(folder)
    return folder


PlainRuns = Callable[[str, int], tuple[Run, Path]]


@pytest.fixture(scope="session")
def plain_runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    """Runs a script without the flag in so many processes, once; gives how it ended and what it saved."""

    @functools.cache
    def run_once(script: str, processes: int) -> tuple[Run, Path]:
        cwd = tmp_path_factory.mktemp("plain")
        command = [str(SCRIPTS / script), str(folder), str(cwd / "plain")]
        return run_plain(*command, cwd=cwd, processes=processes), cwd / "plain"

    return run_once


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(ours: Path, plain: Path) -> None:
    found, expected = weights(ours), weights(plain)
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


@pytest.mark.parametrize(
    ("script", "processes"),
    [
        ("with_trainer.py", 1),
        pytest.param("with_accelerator.py", 2, marks=pytest.mark.wide),
        pytest.param("with_states.py", 2, marks=pytest.mark.process),
        pytest.param("with_trainer.py", 2, marks=pytest.mark.wide),
        pytest.param("with_accelerator.py", 1, marks=pytest.mark.wide),
        pytest.param("with_states.py", 1, marks=pytest.mark.wide),
    ],
)
def test_an_unchanged_script_gives_the_same(
    script: str, processes: int, folder: Path, plain_runs: PlainRuns, tmp_path: Path
) -> None:
    plain, saved = plain_runs(script, processes)
    command = [str(SCRIPTS / script), str(folder)]
    number = ["--num_processes", str(processes), "--main_process_port", "0"]
    ours = run(*ACCELERATE, *flags(tmp_path), "--cpu", *number, *command, str(tmp_path / "ours"), cwd=tmp_path)
    assert plain.code == ours.code == 0, plain.err[-3000:] + ours.err[-3000:]
    assert ours.result == plain.result
    assert_same(tmp_path / "ours", saved)
    assert not list(tmp_path.glob("ptm_accel-*")), "nothing is left on the disk"


@pytest.mark.process
@pytest.mark.parametrize(
    "way", ["module", *(pytest.param(way, marks=pytest.mark.wide) for way in ("launch as a module", "torchrun", "own"))]
)
def test_other_ways_to_say_it(way: str, folder: Path, plain_runs: PlainRuns, tmp_path: Path) -> None:
    plain, saved = plain_runs("with_trainer.py", 1)
    options = environment_of(tmp_path)
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [str(SCRIPTS / "with_trainer.py"), str(folder), str(tmp_path / "ours")]
    if way == "module":
        ours = run(*ACCELERATE, "--cpu", "-m", "ptm_accel", *command, cwd=tmp_path, **options, **off)
    elif way == "launch as a module":
        ours = run("-m", "accelerate.commands.launch", "--cpu", *flags(tmp_path), *command, cwd=tmp_path)
    elif way == "torchrun":
        ours = run("-m", "torch.distributed.run", "--standalone", *command, cwd=tmp_path, **options)
    else:
        ours = run("-m", "ptm_accel.cli", "launch", "--cpu", *flags(tmp_path)[1:], *command, cwd=tmp_path, **off)
    assert plain.code == ours.code == 0, plain.err[-3000:] + ours.err[-3000:]
    assert "host_memory: " in ours.err, "the resolved options are shown"
    assert ours.result == plain.result
    assert_same(tmp_path / "ours", saved)


@pytest.mark.slow
def test_values_that_are_cast_as_they_are_read_are_the_same(folder: Path, tmp_path: Path) -> None:
    command = [str(SCRIPTS / "with_trainer.py"), str(folder)]
    plain = run(*command, str(tmp_path / "plain"), "bfloat16", cwd=tmp_path)
    ours = run(*ACCELERATE, *flags(tmp_path), "--cpu", *command, str(tmp_path / "ours"), "bfloat16", cwd=tmp_path)
    assert plain.code == ours.code == 0, plain.err[-3000:] + ours.err[-3000:]
    assert ours.result == plain.result
    assert_same(tmp_path / "ours", tmp_path / "plain")


@pytest.mark.process
def test_a_model_that_is_larger_than_memory_is_read_onto_pages(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.model(num_hidden_layers=16).save_pretrained(tmp_path / "model", max_shard_size="300KB")
    text = (SCRIPTS / "with_trainer.py").read_text()
    look = '    import ptm_accel\n    print("PAGED", ptm_accel.engine_of(model) is not None)\n'
    before = "    model.resize_token_embeddings"
    assert before in text
    (tmp_path / "script.py").write_text(text.replace(before, look + before))
    command = ["script.py", "model"]
    plain = run_plain(*command, "plain", cwd=tmp_path)
    # As in the process that `accelerate launch --use_ptm` starts, but for the imports.
    ours = run_plain("-m", "ptm_accel", *flags(tmp_path)[1:], *command, "ours", cwd=tmp_path)
    assert plain.code == ours.code == 0, plain.err[-3000:] + ours.err[-3000:]
    assert "PAGED False" in plain.out
    assert "PAGED True" in ours.out
    assert ours.result == plain.result
    assert_same(tmp_path / "ours", tmp_path / "plain")


@pytest.mark.process
def test_a_script_that_puts_nothing_on_pages_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import torch\nprint('done')\n")
    found = run("idle.py", cwd=tmp_path, ACCELERATE_USE_PTM="true")
    assert "done" in found.out
    assert found.code == 0
    assert "no model was put on them" in found.err


@pytest.mark.slow
def test_processes_that_a_script_starts_need_not_use_pages(folder: Path, tmp_path: Path) -> None:
    text = (SCRIPTS / "with_trainer.py").read_text()
    other = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch'], check=True)\n"
    (tmp_path / "script.py").write_text(other + text)
    found = run(*ACCELERATE, *flags(tmp_path), "--cpu", "script.py", str(folder), str(tmp_path / "out"), cwd=tmp_path)
    assert found.code == 0, found.err[-3000:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--use_ptm", "--ptm_host_memroy", "4GB"], "unknown flag --ptm_host_memroy; did you mean --ptm_host_memory?"),
        (["--use_ptm", "--ptm-disc=/x"], "unknown flag --ptm-disc; did you mean --ptm_disk?"),
        (["--ptm_host_memory", "4GB"], "--ptm_host_memory does nothing without --use_ptm; add --use_ptm."),
        (["--use_ptm", "--ptm_host_memory", "lots"], "host_memory: "),
        (["--use_ptm", "--ptm_update", "lock_less"], "update: got 'lock_less'; write"),
        (["--use_ptm", "--ptm_shard", "half"], "shard: got 'half'; write"),
        (["--use_ptm", "--ptm_shard", "full", "--ptm_token_slices", "4"], "cannot be combined with token_slices"),
        (["--use_ptm", "--ptm_disk_limit", "4GB"], "is a limit without a disk; set disk as well."),
        (["--use_ptm", "--ptm_config_file", "none.yaml"], "none.yaml: no such file"),
        (["--use_ptm", "--ptm_config_file", "bad.yaml"], "bad.yaml: not valid YAML"),
        (["--use_ptm", "--ptm_gpu", "4GB"], "unknown flag --ptm_gpu; did you mean --ptm_device_memory?"),
        (["--use_ptmm"], "unknown flag --use_ptmm; did you mean --use_ptm?"),
        (["--use_ptm", "--ptm_xyz", "4"], "unknown flag --ptm_xyz; the flags are: --use_ptm, --ptm_device_memory,"),
        (
            ["--use_ptm", "--ptm_host_memory", "--cpu"],
            "argument --ptm_host_memory/--ptm-host-memory: expected one argument",
        ),
        (["--use_ptm", "--num_processes", "two"], "argument --num_processes/--num-processes: invalid int value: 'two'"),
        (["--use_ptm", "--ptm_host_memory", "900TB"], "host_memory: asked 818.55 TiB, the "),
        (
            ["--use_ptm", "--ptm_host_memory", "16"],
            "host_memory: 16 B cannot hold one page of 4.00 MiB (a number without",
        ),
        (["--use_ptm", "--ptm_disk", "missing"], "missing (No such file or directory); set disk.paths to an existing"),
        (["--use_ptm", "--ptm_disk", "bad.yaml"], "bad.yaml (Not a directory); set disk.paths to an existing"),
        (["--use_ptm", "--ptm_disk", ".", "--ptm_disk_limit", "900TB"], "disk.limit: asked 818.55 TiB, the free space"),
        (["--use_ptm", "--use_deepspeed"], "DeepSpeed (--use_deepspeed) and ptm_accel (--use_ptm, or ptm_config"),
        (["--use_ptm", "--use_fsdp"], "FSDP (--use_fsdp) and ptm_accel"),
        (["--config_file", "typo.yaml"], "unknown key 'host_memroy'; did you mean 'host_memory'?"),
        (["--config_file", "list.yaml"], "expected a mapping of options, got list"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str], message: str, host: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n"
    (tmp_path / "bad.yaml").write_text("host_memory: [\n")
    (tmp_path / "typo.yaml").write_text(plain + "ptm_config:\n  host_memroy: 4GB\n")
    (tmp_path / "list.yaml").write_text(plain + "ptm_config: [4GB]\n")
    with pytest.raises(SystemExit) as ended:
        host._validate_launch_command(host.launch_command_parser().parse_args([*arguments, "script.py"]))
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1]
    assert said[-1].startswith("accelerate launch: error: ")
    assert [line for line in said if not line.startswith(("The following", "\t`--", "To avoid"))] == said[-1:]
    assert "ACCELERATE_USE_PTM" not in os.environ


def test_a_flag_of_accelerates_own_is_refused_as_ever(host: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        host.launch_command_parser().parse_args(["--num_processes", "two", "script.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_folders_that_only_processes_can_name_are_left_to_them(host: ModuleType, tmp_path: Path) -> None:
    command = ["--use_ptm", "--ptm_disk", "missing/$LOCAL_RANK", "--num_processes", "1", "script.py"]
    host._validate_launch_command(host.launch_command_parser().parse_args(command))
    assert os.environ["PTM_DISK"] == "missing/$LOCAL_RANK"


@pytest.mark.parametrize("processes", [1, 2])
def test_shares_are_checked_for_all_processes_of_the_machine(
    processes: int, host: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "host_limit", lambda: machine.MemoryLimit(1 << 30, "physical memory"))
    args = ["--use_ptm", "--ptm_host_memory", "768MiB", "--num_processes", str(processes), "script.py"]
    parsed = host.launch_command_parser().parse_args(args)
    if processes == 1:
        host._validate_launch_command(parsed)
        return
    with pytest.raises(SystemExit):
        host._validate_launch_command(parsed)
    said = "is 512.00 MiB; set host_memory to at most 512MiB.\n"
    assert capsys.readouterr().err.endswith(f"the physical memory, over 2 processes {said}")


def test_the_launcher_adds_nothing_to_the_error_of_a_script(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(args: object) -> None:
        raise subprocess.CalledProcessError(code, "script.py")

    monkeypatch.setattr(launch, "simple_launcher", fails)
    by_signal = "accelerate launch: the script was ended by SIGKILL. Memory may have run out: lower host_memory or the"
    code = 0
    for number, said in ((3, ""), (-9, by_signal)):
        code = number
        parsed = host.launch_command_parser().parse_args(["--use_ptm", "--num_processes", "1", "script.py"])
        with pytest.raises(SystemExit) as ended:
            host.launch_command(parsed)
        assert ended.value.code == 1
        assert capsys.readouterr().err.startswith(said)
    monkeypatch.setenv("PTM_DEBUG", "1")
    with pytest.raises(subprocess.CalledProcessError):
        host.launch_command(parsed)
    monkeypatch.delenv("PTM_DEBUG")
    monkeypatch.delenv("ACCELERATE_USE_PTM")
    with pytest.raises(subprocess.CalledProcessError):
        host.launch_command(host.launch_command_parser().parse_args(["--num_processes", "1", "script.py"]))


def test_a_flag_behind_the_script_is_refused(host: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        host._validate_launch_command(host.launch_command_parser().parse_args(["script.py", "--use_ptm"]))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--use_ptm comes after the script script.py, and would be passed to it; put it before." in said


def test_what_was_asked_is_told_to_the_processes(host: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("host_memory: 8GB\nupdate: blocking\n")
    flags = ["--use_ptm", "--ptm_config_file", "options.yaml", "--ptm-host-memory", "4GB", "--num_processes", "1"]
    flags += ["--ptm_shard", "none"]
    host._validate_launch_command(host.launch_command_parser().parse_args([*flags, "script.py"]))
    told = {name: value for name, value in os.environ.items() if name in TOLD}
    options = {"PTM_HOST_MEMORY": "4GB", "PTM_UPDATE": "blocking", "PTM_PAGE_SIZE": "4MiB", "PTM_SHARD": "none"}
    assert told == {**options, "PTM_CHECKPOINT_HASHES": "True", "PTM_MICRO_BATCHES": "one_by_one"}
    assert os.environ["ACCELERATE_USE_PTM"] == "true"


def test_a_section_of_the_configuration_file_switches_it_on_and_flags_win(host: ModuleType, tmp_path: Path) -> None:
    plain = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "use_cpu": True}
    section = {"host_memory": "64MiB", "page_size": 4096, "disk": str(tmp_path)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**plain, "ptm_config": section}))
    command = ["--config_file", "config.yaml", "--ptm_host_memory", "32MiB", "script.py"]
    host._validate_launch_command(host.launch_command_parser().parse_args(command))
    told = {name: value for name, value in os.environ.items() if name in TOLD}
    assert os.environ["ACCELERATE_USE_PTM"] == "true"
    assert told["PTM_HOST_MEMORY"] == "32MiB"
    options = from_environment(os.environ)
    assert options is not None
    assert (options.host_memory, options.page_size) == ("32MiB", "4096")
    assert isinstance(options.disk, DiskConfig)
    assert options.disk.paths == (str(tmp_path),)


def test_without_flag_and_section_nothing_is_told(host: ModuleType) -> None:
    host._validate_launch_command(host.launch_command_parser().parse_args(["--num_processes", "1", "script.py"]))
    assert "ACCELERATE_USE_PTM" not in os.environ


def test_a_section_may_be_empty(host: ModuleType, tmp_path: Path) -> None:
    plain = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n"
    (tmp_path / "empty.yaml").write_text(plain + "ptm_config:\n")
    host._validate_launch_command(host.launch_command_parser().parse_args(["--config_file", "empty.yaml", "s.py"]))
    assert os.environ["ACCELERATE_USE_PTM"] == "true"


def test_help_shows_the_flags(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate", "launch", "--help"])
    assert "--use_ptm" in host.launch_command_parser().format_help()
    monkeypatch.setattr(sys, "argv", ["accelerate", "launch", "--use_ptm", "--help"])
    shown = host.launch_command_parser().format_help()
    for flag in ("--ptm_device_memory", "--ptm_host_memory", "--ptm_disk", "--ptm_config_file"):
        assert flag in shown


def test_help_of_our_own_launcher_has_an_example(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching.autoload, "watch", lambda patches: None)
    shown = CliRunner().invoke(cli.app, ["launch", "--help"])
    assert shown.exit_code == 0
    assert shown.output.endswith("ptm-accel launch --ptm_host_memory 8GB --ptm_disk /mnt/ssd train.py\n")


def test_without_the_switch_nothing_is_done(tmp_path: Path) -> None:
    code = (
        "import sys, torch, accelerate, transformers.trainer, transformers.modeling_utils\n"
        "assert not [f for f in sys.meta_path if type(f).__module__.startswith('ptm_accel')]\n"
        "assert [m for m in sys.modules if m.startswith('ptm_accel')] == ['ptm_accel', 'ptm_accel.autoload']\n"
        "assert '__new__' not in vars(accelerate.Accelerator)\n"
        "assert 'ptm' not in transformers.PreTrainedModel.from_pretrained.__func__.__code__.co_filename\n"
    )
    (tmp_path / "plain.py").write_text(code)
    # Of the process that has imported the hosts before it.
    found = run_plain("plain.py", cwd=tmp_path)
    assert found.code == 0, found.err


# At every change, by `with_trainer.py`, which imports torch first, and by `with_states.py`, which imports accelerate.
@pytest.mark.wide
@pytest.mark.parametrize("first", ["accelerate", "transformers", "peft"])
def test_any_order_of_imports(first: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "order.py").write_text(
        f"import {first}\n"
        "from accelerate import Accelerator\n"
        "from transformers import Trainer\n"
        "assert type(Accelerator(cpu=True)).__name__ == 'PTMAccelerator'\n"
        "assert '__new__' in vars(Trainer)\n"
        "import os\n"
        "os._exit(0)\n"
    )
    found = run("order.py", cwd=tmp_path, ACCELERATE_USE_PTM="1")
    assert found.code == 0, found.err
