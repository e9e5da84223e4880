"""Bad input to every command and flag: an exit status that is not 0, at most five lines, and no traceback."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import LlamaConfig
from typer.main import get_command

from ptm_accel import __main__, cli
from ptm_accel.checkpoint.manifest import MANIFEST_NAME
from ptm_accel.commands import launching
from ptm_accel.environment import CONFIG_FILE, TEXT_OPTIONS
from tests.prepared import run_prepared

MOST_LINES = 5

OPTIONS = """
--ptm_device_memory lots                 | device_memory: 'lots' is not a byte count
--ptm_device_memory 0GB                  | device_memory: 0 B cannot hold one page
--ptm_host_memory 101%                   | more than the whole
--ptm_host_memory=-5GB                   | '-5GB' is not a byte count
--ptm_host_memory 16                     | a number without a unit is bytes
--ptm_host_memory 900TB                  | set host_memory to at most
--ptm_disk missing                       | No such file or directory
--ptm_disk ,                             | names no folder
--ptm_disk file                          | Not a directory
--ptm_disk_limit 5GB                     | set disk as well
--ptm_disk . --ptm_disk_limit 900TB      | set disk.limit to at most
--ptm_disk . --ptm_disk_verify maybe     | write true or false
--ptm_update now                         | update: got 'now'
--ptm_page_size 4000                     | not a power of two
--ptm_pseudo_to_real never               | pseudo_to_real.delink: got 'never'
--ptm_token_slices 0                     | token_slices: got '0'
--ptm_moments copy                       | set pseudo_to_real as well
--ptm_pipeline_stages 1                  | pipeline.stages: got '1'
--ptm_checkpoint_hashes perhaps          | write true or false
--ptm_master_weights fp8                 | master_weights: got 'fp8'
--ptm_shard half                         | shard: got 'half'
--ptm_micro_batches by_row               | micro_batches: got 'by_row'
--ptm_max_staleness -1                   | max_staleness: got '-1'
--ptm_max_staleness 2                    | it is for update: lock_free
--ptm_config_file missing.yaml           | missing.yaml: no such file
--ptm_config_file broken.yaml            | not valid YAML
--ptm_config_file typo.yaml              | did you mean 'host_memory'?
--ptm_config_file later.yaml             | a later ptm_accel may know it
--ptm_host_memroy 8GB                    | did you mean --ptm_host_memory?
"""
"""What launchers take, with what they say."""

COMMANDS = """
estimat model                            | Did you mean 'estimate'?
--versoin                                | No such option: --versoin
env --jsn                                | No such option: --jsn
env more                                 | Got unexpected extra argument
doctor --disk ,                          |
estimate                                 | Missing argument 'model'
estimate ./missing                       | no such directory: ./missing
estimate empty                           | has no configuration that can be read
estimate broken                          | has no configuration that can be read
estimate odd                             | no model can be made
estimate file                            | has no configuration that can be read
estimate model --batch_size 0            | Invalid value for '--batch_size'
estimate model --batch-size two          | Invalid value for '--batch_size'
estimate model --length -1               | Invalid value for '--length'
estimate model --dtype int8              | dtype: 'int8' is unknown
estimate model --bf16=maybe              | --bf16
estimate model --checkpointing=maybe     | --checkpointing
estimate model --master_weights fp8      | master_weights: got 'fp8'
estimate model --page_size 4000          | not a power of two
estimate model --processes 0             | Invalid value for '--processes'
estimate model --gpu 0GB                 |
estimate model --gpu 24@165TFLOPS        |
estimate model --gpu 4091                |
estimate model --ram lots                |
estimate model --ssd 1TB@fast            |
estimate model --gpu 4090 --link 25      |
estimate model --cpu fast                |
estimate model --network 100Gb/s         | network: it is between processes
estimate model --lora r=0                |
estimate model --optim madam             |
plan                                     | Missing argument 'model'
plan ./missing                           | no such directory: ./missing
plan model --device_memory lots          | device_memory: 'lots' is not a byte count
plan model --host_memory 0GB             | host_memory: 0 B cannot hold one page
plan model --disk missing                | No such file or directory
plan model --batch_size 0                | Invalid value for '--batch_size'
plan model --length 0                    | Invalid value for '--length'
plan model --dtype int8                  | dtype: 'int8' is unknown
plan model --checkpointing=maybe         | --checkpointing
plan model --master_weights fp8          | master_weights: got 'fp8'
plan model --page_size 4XB               | '4XB' is not a byte count
plan model --gpu 0GB                     |
plan model --ram lots                    |
plan model --ssd 1TB@fast                |
plan model --gpu 4090 --link 25          |
plan model --cpu fast                    |
plan model --network 100Gb/s             | network: it is between processes
plan model --lora r=0                    |
plan model --optim madam                 |
plan model --processes 0                 |
plan model --bf16=maybe                  |
slices model                             | Missing option '--stages'
slices model --stages 1                  | Invalid value for '--stages'
slices model --stages 9                  | set it to at most 2
slices model --stages 2 --length 40      | too few to be cut
slices model --stages 2 --batch_size 0   | Invalid value for '--batch_size'
slices model --stages 2 --dtype int8     | dtype: 'int8' is unknown
slices model --stages 2 --seq 64         | No such option: --seq
config --config_file .                   | Is a directory
config --config_file list.yaml           | not a mapping
config                                   | nothing was written
export                                   | Missing argument 'checkpoint'
export missing                           | no such directory: missing
export empty                             | has no optimizer state
export empty --output no/such/folder/x   | has no optimizer state
export empty --force=maybe               | --force
check missing                            | no such directory: missing
check file                               | no such directory: file
check damaged                            | is damaged: Expecting value
launch                                   | arguments are required
launch --num_processes two script.py     | invalid int value: 'two'
launch --cpu --multi_gpu script.py       | You can only use one of
launch --config_file no.yaml script.py   | no.yaml
launch --use_fsdp script.py              | both want to place the same parameters
launch script.py --ptm_disk .            | comes after the script script.py
"""
"""Of those without words on the right, what they say is tested elsewhere."""


def rows(table: str) -> list[Any]:
    split = [[part.strip() for part in line.split("|")] for line in table.strip().splitlines()]
    return [pytest.param(words.split(), said, id=words) for words, said in split]


@pytest.fixture
def call(
    host: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[list[str]], None], list[str]], str]:
    """Calls an entry point in a folder of good and bad files; gives what it has said."""
    for name, content in {
        "file": "",
        "script.py": "raise SystemExit('it was started')\n",
        "broken.yaml": "host_memory: [\n",
        "list.yaml": "- 1\n",
        "typo.yaml": "host_memroy: 4GB\n",
        "later.yaml": "host_memory: 4GB\nwormholes: 4\n",
        "broken/config.json": "{",
        "odd/config.json": json.dumps({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}),
        f"damaged/{MANIFEST_NAME}": "",
        "empty/notes": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    ).save_pretrained(tmp_path / "model")
    # The launcher is the one of the fixture.
    monkeypatch.setattr(launching.autoload, "watch", lambda patches: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def called(entry: Callable[[list[str]], None], words: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            entry(words)
        assert ended.value.code not in (0, None)
        written = capsys.readouterr()
        text: str = written.out + written.err
        assert "Traceback" not in text
        assert 1 <= len(text.splitlines()) <= MOST_LINES, text
        return text

    return called


@pytest.mark.parametrize(("words", "said"), rows(COMMANDS))
def test_a_command_that_cannot_be_carried_out(words: list[str], said: str, call: Callable[..., str]) -> None:
    assert said in call(cli.main, words)


@pytest.mark.parametrize(("words", "said"), rows(OPTIONS))
@pytest.mark.parametrize("launcher", ["ptm-accel launch", "python -m ptm_accel"])
def test_an_option_that_cannot_be_used(launcher: str, words: list[str], said: str, call: Callable[..., str]) -> None:
    entry, before = (cli.main, ["launch"]) if launcher == "ptm-accel launch" else (__main__.main, [])
    text = call(entry, [*before, *words, "script.py"])
    assert said in text
    assert text.startswith(f"{launcher}: error: ")


def test_every_option_has_bad_input() -> None:
    tried = {command: set[str]() for command in get_command(cli.app).commands}  # type: ignore[attr-defined]
    for words, _ in (row.values for row in rows(COMMANDS)):
        if words[0] in tried:
            tried[words[0]].update(word.split("=")[0].replace("-", "_") for word in words if word.startswith("--"))
    for name, command in get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        options = {opt.replace("-", "_") for param in command.params for opt in param.opts if opt.startswith("--")}
        assert options - tried[name] <= {"__json"}, f"{name}: {options - tried[name]}"
    flags = {word.split("=")[0] for row in rows(OPTIONS) for word in row.values[0] if word.startswith("--")}
    assert flags >= {f"--ptm_{option}" for option in (*TEXT_OPTIONS, CONFIG_FILE)}


@pytest.mark.process
@pytest.mark.parametrize("words", ["-m ptm_accel.cli estimate ./missing", "-m ptm_accel --ptm_disk missing script.py"])
def test_the_same_in_processes(words: str, tmp_path: Path) -> None:
    found = run_prepared(*words.split(), cwd=tmp_path)
    assert found.code == 2
    assert found.out == ""
    assert len(found.err.splitlines()) == 1
