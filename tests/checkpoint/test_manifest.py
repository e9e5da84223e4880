"""The manifest of a checkpoint: what is covered, and that any change of it is told by the file's name."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ptm_accel.checkpoint import crc, manifest
from ptm_accel.checkpoint.crc import threads
from ptm_accel.checkpoint.directory import staged
from ptm_accel.checkpoint.manifest import MANIFEST_NAME, check_manifest, read_manifest
from ptm_accel.checkpoint.training_state import OUTDATED
from ptm_accel.errors import CheckpointError

COVERED = {
    "model.safetensors": 5000,
    "model.safetensors.index.json": 300,
    "optimizer.json": 40,
    "scheduler.pt": 1,
    "trainer_state.json": 0,
    "stage-1-of-2/optimizer.json": 40,
    "adapter/adapter_model.safetensors": 1000,
}
EDITED = ("config.json", "README.md", "tokenizer.json", "training_args.bin")


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (crc, manifest):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    with staged(tmp_path / "c", sums={}) as staging:
        for name, nbytes in COVERED.items():
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_bytes(os.urandom(nbytes))
        for name in EDITED:
            (staging / name).write_text("as it was")
        (staging / "linked.pt").symlink_to("scheduler.pt")
    return tmp_path / "c"


def test_what_training_goes_on_from_is_covered(saved: Path) -> None:
    found = check_manifest(saved)
    assert found is not None
    assert {name: each.nbytes for name, each in found.items()} == COVERED
    assert all(len(each.crcs) == -(-each.nbytes // 1000) for each in found.values())


def test_the_rest_may_change(saved: Path) -> None:
    for name in EDITED[:2]:
        (saved / name).write_text("edited")
    for name in EDITED[2:]:
        (saved / name).unlink()
    (saved / "ema.pt").write_text("added later")
    assert check_manifest(saved) is not None


def flip(path: Path) -> None:
    octets = bytearray(path.read_bytes())
    octets[-1] ^= 4
    path.write_bytes(octets)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, r"bytes 4000 to 5000 are not those that were saved \(CRC-32 \w{8}, and was \w{8}\)"),
    "truncated": (lambda p: os.truncate(p, 4000), r"it has 4000 bytes, and had 5000 when the checkpoint was saved"),
    "longer": (lambda p: os.truncate(p, 5001), r"it has 5001 bytes, and had 5000 when"),
    "missing": (lambda p: p.unlink(), r"it is missing, and had 5000 bytes when"),
    "a pipe": (lambda p: replace(p, os.mkfifo), r"it is no regular file"),
    "a folder": (lambda p: replace(p, Path.mkdir), r"it is no regular file"),
    "a link to nothing": (lambda p: replace(p, lambda q: q.symlink_to("none")), r"it is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_by_name(kind: str, saved: Path) -> None:
    damage, text = DAMAGE[kind]
    damage(saved / "model.safetensors")
    end = r"\. Resume from another checkpoint, or set checkpoint_hashes to false if it was changed on purpose\.$"
    with pytest.raises(CheckpointError, match=rf"c/model.safetensors is damaged: {text}.*{end}"):
        check_manifest(saved)


@pytest.mark.parametrize("name", [name for name, nbytes in COVERED.items() if nbytes])
def test_every_covered_file_is_compared(name: str, saved: Path) -> None:
    flip(saved / name)
    with pytest.raises(CheckpointError, match=f"c/{name} is damaged"):
        check_manifest(saved)


def test_a_file_that_is_read_from_elsewhere_may_be_a_link(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved / "model.safetensors", tmp_path / "moved")
    (saved / "model.safetensors").symlink_to(tmp_path / "moved")
    assert check_manifest(saved) is not None


def test_a_flipped_byte_of_the_manifest_is_told(saved: Path) -> None:
    path = saved / MANIFEST_NAME
    octets = path.read_bytes()
    unlike = 0
    for at in range(0, len(octets), 7):
        path.write_bytes(octets[:at] + bytes([octets[at] ^ 1]) + octets[at + 1 :])
        if chr(octets[at]).isspace():
            continue
        with pytest.raises(CheckpointError, match=re.escape(f"{path} is damaged: ")):
            check_manifest(saved)
        unlike += 1
    assert unlike > 50


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is damaged: Expecting value"),
        ("[]", "is damaged: it is not of the format 'ptm_accel manifest'"),
        ("[" * 100_000, "is damaged: maximum recursion depth exceeded"),
        ('{"format": "ptm_accel manifest", "crc32": 7}', "is damaged: its bytes are not those that were written"),
    ],
)
def test_what_is_no_manifest(content: str, text: str, saved: Path) -> None:
    (saved / MANIFEST_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=text):
        read_manifest(saved)


def test_a_manifest_of_another_version(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "VERSION", 2)
        manifest.write_manifest(saved, {})
    text = (
        r"has version 2 of its format, and this ptm_accel reads version 1\. A later ptm_accel "
        r"wrote it: install that version, or set checkpoint_hashes to false\.$"
    )
    with pytest.raises(CheckpointError, match=text):
        check_manifest(saved)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "VERSION", 0)
        manifest.write_manifest(saved, {})
    with pytest.raises(CheckpointError, match=r"version 0 .*\. Install the ptm_accel that wrote it, or set check"):
        check_manifest(saved)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "PIECE_BYTES", 2000)
        manifest.write_manifest(saved, {})
    text = r"has CRCs of pieces of 2000 bytes, and this ptm_accel reads those of 1000\. Install the ptm_accel that"
    with pytest.raises(CheckpointError, match=text):
        check_manifest(saved)


def test_without_a_manifest_nothing_is_compared(saved: Path) -> None:
    (saved / MANIFEST_NAME).unlink()
    flip(saved / "model.safetensors")
    assert check_manifest(saved) is None


def test_what_a_plain_run_has_saved_over_it_is_not_compared(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(saved / "model.safetensors")
    (saved / "optimizer.pt").touch()
    written = (saved / MANIFEST_NAME).stat().st_mtime_ns
    # An exported state is as old as what it was made from.
    os.utime(saved / "optimizer.pt", ns=(written, written - 1))
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        check_manifest(saved)
    os.utime(saved / "optimizer.pt", ns=(written, written + 1))
    with caplog.at_level(logging.WARNING):
        assert check_manifest(saved) is None
    assert "optimizer.pt was saved without pages after ptm_manifest.json, which is not compared with it." in caplog.text


def test_what_is_known_is_not_read_again(tmp_path: Path) -> None:
    with threads() as pool:
        (tmp_path / "a.pt").write_text("a")
        known = manifest.completed(tmp_path, ["a.pt"], {}, pool)
        (tmp_path / "a.pt").unlink()
        assert manifest.completed(tmp_path, ["a.pt"], known, pool) == known


def test_a_replaced_checkpoint_has_a_manifest_of_what_was_written(saved: Path) -> None:
    (saved / "ema.pt").write_text("somebody's")
    with staged(saved, outdated=OUTDATED, sums={}) as staging:
        (staging / "scheduler.pt").write_text("new")
    assert (saved / "ema.pt").exists()
    found = check_manifest(saved)
    assert found is not None
    assert list(found) == ["scheduler.pt"]
    with staged(saved, outdated=OUTDATED) as staging:
        (staging / "scheduler.pt").write_text("newer")
    assert not (saved / MANIFEST_NAME).exists()


def test_the_layout(saved: Path) -> None:
    read = json.loads((saved / MANIFEST_NAME).read_text())
    assert (read["format"], read["version"], read["piece_bytes"]) == ("ptm_accel manifest", 1, 1000)
    assert read["files"]["trainer_state.json"] == {"bytes": 0, "crc32": []}
