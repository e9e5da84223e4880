"""Options: their list, how they are read and refused, and what they come to on a machine."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import traceback
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ptm_accel import machine
from ptm_accel.config import DiskConfig, PTMConfig, ResolvedConfig, check_disk_path, resolve
from ptm_accel.errors import BudgetError, ConfigError
from ptm_accel.machine import MemoryLimit
from ptm_accel.units import GIB, KIB, MIB

LATER = "a later ptm_accel may know it, and ptm-accel --version shows this one. "
OPTIONS = (
    "device_memory, host_memory, disk, update, page_size, master_weights, pseudo_to_real, token_slices, pipeline, "
    "checkpoint_hashes, shard, micro_batches, max_staleness"
)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of 8 GiB, of which 5 GiB are available."""
    monkeypatch.setattr(machine, "host_limit", lambda: MemoryLimit(8 * GIB, "cgroup v1 limit"))
    monkeypatch.setattr(machine, "available_bytes", lambda: 5 * GIB)


class TestOptions:
    def test_the_list_of_options_is_frozen(self) -> None:
        """A new option is a conscious act: it changes this test, the documentation and the changelog."""
        assert {field.name: field.default for field in dataclasses.fields(PTMConfig)} == {
            "device_memory": None,
            "host_memory": None,
            "disk": None,
            "update": "exact",
            "page_size": "4MiB",
            "master_weights": None,
            "pseudo_to_real": None,
            "token_slices": None,
            "pipeline": None,
            "checkpoint_hashes": True,
            "shard": "auto",
            "micro_batches": "one_by_one",
            "max_staleness": None,
        }
        assert [field.name for field in dataclasses.fields(DiskConfig)] == ["paths", "limit", "verify"]

    def test_a_configuration_cannot_be_changed(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            PTMConfig().host_memory = "1GB"  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("disk", "expected"),
        [
            (None, None),
            ("/a", DiskConfig(paths=("/a",))),
            (Path("/a"), DiskConfig(paths=("/a",))),
            (["/a", "/b"], DiskConfig(paths=("/a", "/b"))),
            (("/a", "/b"), DiskConfig(paths=("/a", "/b"))),
            ({"paths": "/a", "limit": "5GB"}, DiskConfig(paths=("/a",), limit="5GB")),
            ({"paths": ["/a", "/b"]}, DiskConfig(paths=("/a", "/b"))),
            (DiskConfig(paths=("/a",), limit=7), DiskConfig(paths=("/a",), limit=7)),
        ],
    )
    def test_disk_takes_several_forms(self, disk: Any, expected: DiskConfig | None) -> None:
        assert PTMConfig(disk=disk).disk == expected

    @pytest.mark.parametrize(("given", "kept"), [(None, None), ("none", None), ("fp32", "fp32")])
    def test_master_weights(self, given: str | None, kept: str | None) -> None:
        assert PTMConfig(master_weights=given).master_weights == kept

    @pytest.mark.parametrize("shard", ["auto", "none"])
    @pytest.mark.parametrize("beside", [{"pipeline": 2}, {"pseudo_to_real": "auto"}, {"token_slices": 4}])
    def test_layers_that_stay_whole_go_with_everything(self, shard: str, beside: dict[str, Any]) -> None:
        assert PTMConfig(shard=shard, **beside).shard == shard

    @pytest.mark.parametrize("page_size", [4096, "4096", "64KiB", "4MiB", "1GiB"])
    def test_page_sizes_that_are_taken(self, page_size: str | int) -> None:
        assert PTMConfig(page_size=page_size).page_size == page_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory": "lots"}, "host_memory: 'lots' is not a byte count; use a whole number of bytes"),
        ({"host_memory": True}, "host_memory: True is not a byte count; use"),
        ({"host_memory": "120%"}, "host_memory: '120%' is more than the whole; use at most \"100%\"."),
        (
            {"host_memory": 0},
            "host_memory: 0 B cannot hold one page of 4.00 MiB; raise host_memory, or lower page_size.",
        ),
        ({"host_memory": "0%"}, "host_memory: 0 B cannot hold one page of 4.00 MiB; raise host_memory"),
        ({"host_memory": "1MiB"}, "host_memory: 1.00 MiB cannot hold one page of 4.00 MiB; raise host_memory"),
        (
            {"host_memory": "16"},
            "host_memory: 16 B cannot hold one page of 4.00 MiB (a number without a unit is bytes; in a shell a size "
            "is one word, such as 16GB); raise host_memory, or lower page_size.",
        ),
        ({"device_memory": 8}, "device_memory: 8 B cannot hold one page of 4.00 MiB (a number without a unit is bytes"),
        ({"host_memory": "1GiB", "page_size": "2GiB"}, "host_memory: 1.00 GiB cannot hold one page of 2.00 GiB; raise"),
        ({"device_memory": "0GB"}, "device_memory: 0 B cannot hold one page of 4.00 MiB; raise device_memory"),
        ({"device_memory": "3XB"}, "device_memory: '3XB' is not a byte count; use"),
        ({"page_size": "1%"}, "page_size: '1%' is a share, and here there is no total to take it of; use a size"),
        (
            {"page_size": "3MiB"},
            "page_size: '3MiB' is 3145728 B, which is not a power of two and a multiple of 4096 B; "
            "use a size such as '4MiB'.",
        ),
        ({"page_size": 2048}, "page_size: 2048 is 2048 B, which is not a power of two and a multiple of 4096 B"),
        ({"page_size": 0}, "page_size: 0 is 0 B, which is not a power of two"),
        (
            {"update": "fast"},
            "update: got 'fast'; write update: exact or update: blocking or update: lock_free.",
        ),
        ({"master_weights": "bf16"}, "master_weights: got 'bf16'; write master_weights: fp32 or"),
        ({"shard": "half"}, "shard: got 'half'; write shard: auto or shard: full or shard: none."),
        (
            {"shard": "node"},
            "shard: node (layers cut over the processes of each machine, and whole on every machine) is not supported "
            "yet; write shard: full, which cuts them over all processes.",
        ),
        ({"shard": None}, "shard: got None; write shard: auto or"),
        (
            {"shard": "full", "pipeline": 2},
            "shard: layers cut over processes (full) cannot be combined with pipeline; leave one out.",
        ),
        (
            {"shard": "full", "pseudo_to_real": "auto"},
            "shard: layers cut over processes (full) cannot be combined with pseudo_to_real; leave one out.",
        ),
        (
            {"shard": "full", "token_slices": 4},
            "shard: layers cut over processes (full) cannot be combined with token_slices; leave one out.",
        ),
        (
            {"micro_batches": "layers"},
            "micro_batches: got 'layers'; write micro_batches: one_by_one or "
            "micro_batches: by_layer or micro_batches: by_layer_inexact.",
        ),
        (
            {"micro_batches": "by_layer", "token_slices": 4},
            "micro_batches: layers that run by layer cannot be combined with token_slices; leave one out.",
        ),
        (
            {"micro_batches": "by_layer", "shard": "full"},
            "micro_batches: layers that run by layer cannot be cut over processes (shard: full); leave one out.",
        ),
        ({"token_slices": 0}, "token_slices: got 0; write auto, or how many slices each sequence is cut into."),
        ({"token_slices": "many"}, "token_slices: got 'many'; write auto"),
        ({"token_slices": True}, "token_slices: got True; write auto"),
        ({"checkpoint_hashes": "maybe"}, "checkpoint_hashes: got 'maybe'; write true or false."),
        ({"checkpoint_hashes": None}, "checkpoint_hashes: got None; write true or false."),
        ({"disk": {"limit": "5GB"}}, "disk: {'limit': '5GB'} has no paths; set disk.paths to at least one folder."),
        (
            {"disk": {"path": "/a"}},
            "disk: unknown key 'path'; did you mean 'paths'? The keys are: paths, limit, verify.",
        ),
        ({"disk": 7}, "disk: got 7, which names no folder; write disk: /mnt/ssd, several as disk: [/mnt/a"),
        ({"disk": []}, "disk: got [], which names no folder; write disk: /mnt/ssd, several"),
        ({"disk": " "}, "disk: got ' ', which names no folder; write"),
        ({"disk": [1]}, "disk: got [1], which names no folder; write"),
        ({"disk": {"paths": "/a", "limit": 0}}, "disk.limit: 0 B leaves no room for pages; raise it, or leave disk"),
        ({"disk": {"paths": "/a", "verify": "x"}}, "disk.verify: got 'x'; write true or false."),
        ({"disk": {"paths": "/a", "limit": "x"}}, "disk.limit: 'x' is not a byte count; use"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        PTMConfig.load(options)


class TestLoad:
    def test_nothing_is_the_default(self) -> None:
        assert PTMConfig.load(None) == PTMConfig()

    def test_a_configuration_is_itself(self) -> None:
        config = PTMConfig(host_memory="1GiB")
        assert PTMConfig.load(config) is config

    @pytest.mark.parametrize("form", [str, Path])
    def test_a_file(self, tmp_path: Path, form: Any) -> None:
        file = tmp_path / "ptm.yaml"
        file.write_text("host_memory: 16GiB\ndisk:\n  paths: [/a, /b]\n  limit: 50%\nmaster_weights: none\n")
        expected = PTMConfig(host_memory="16GiB", disk=DiskConfig(paths=("/a", "/b"), limit="50%"))
        assert PTMConfig.load(form(file)) == expected

    def test_a_section_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "accelerate.yaml"
        file.write_text("compute_environment: LOCAL_MACHINE\nptm_config:\n  host_memory: 1073741824\n")
        assert PTMConfig.load(file) == PTMConfig(host_memory=GIB)

    @pytest.mark.parametrize("text", ["", "# host_memory: 1GiB\n", "ptm_config:\n", "{}"])
    def test_a_file_without_options_is_the_default(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "ptm.yaml"
        file.write_text(text)
        assert PTMConfig.load(file) == PTMConfig()

    def test_home_and_environment_are_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "ptm.yaml").write_text("host_memory: 1GiB\n")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("PLACE", str(tmp_path))
        assert PTMConfig.load("~/ptm.yaml") == PTMConfig.load("$PLACE/ptm.yaml") == PTMConfig(host_memory="1GiB")

    def test_a_file_that_is_missing(self, tmp_path: Path) -> None:
        file = tmp_path / "none.yaml"
        with pytest.raises(ConfigError, match=f"^{file}: no such file; give the path of a YAML file"):
            PTMConfig.load(file)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=f"^{tmp_path}: cannot be read: .*; give the path of a YAML file."):
            PTMConfig.load(tmp_path)

    def test_a_file_that_is_not_text(self, tmp_path: Path) -> None:
        file = tmp_path / "ptm.yaml"
        file.write_bytes(b"\xff\xfe\xff")
        with pytest.raises(ConfigError, match=f"^{file}: cannot be read: .*codec"):
            PTMConfig.load(file)

    def test_a_file_that_is_not_yaml(self, tmp_path: Path) -> None:
        file = tmp_path / "ptm.yaml"
        file.write_text("host_memory: [1\n")
        with pytest.raises(ConfigError, match=f"(?s)^{file}: not valid YAML: .*line 2.*correct that line."):
            PTMConfig.load(file)

    @pytest.mark.parametrize(("text", "kind"), [("- a\n", "list"), ("ptm_config: 3\n", "int 3")])
    def test_a_file_that_is_not_a_mapping(self, tmp_path: Path, text: str, kind: str) -> None:
        file = tmp_path / "ptm.yaml"
        file.write_text(text)
        message = f"{file}: configuration: expected a mapping of options, got {kind}; write lines such as"
        with pytest.raises(ConfigError, match="^" + re.escape(message)):
            PTMConfig.load(file)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[" * 3000 + "]" * 3000, "is nested too deeply; write options in one or two levels."),
            ("host_memory: " + "9" * 5000, "not valid YAML: a value cannot be what it looks like (ValueError); put"),
            ("host_memory: 2001-99-99", "not valid YAML: a value cannot be what it looks like (ValueError); put"),
            ("host_memory: !!int ''", "not valid YAML: a value cannot be what it looks like (IndexError); put"),
            ("host_memory: &a [*a]", "host_memory: [[[...]]] is not a byte count; use"),
            (
                "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{b}, *{b}]\n" for b, c in pairwise("abcdefghijklmnop")),
                "none of",
            ),
            ("update: \x01", "not valid YAML: it has characters that YAML does not allow; correct that line."),
            ("#" * (1 << 20) + "\n", "is longer than 1.00 MiB; give the path of a YAML file of options."),
        ],
    )
    def test_a_file_that_is_meant_badly(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "ptm.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"^{file}: .*" + re.escape(message)) as caught:
            PTMConfig.load(file)
        assert len(str(caught.value)) < 500

    def test_a_device_is_not_read_to_its_end(self) -> None:
        with pytest.raises(ConfigError, match="^/dev/zero: is longer than 1.00 MiB; give the path of a YAML file"):
            PTMConfig.load("/dev/zero")

    @pytest.mark.parametrize("text", ["a\0b", "\ud800"])
    def test_a_name_that_no_file_can_have(self, text: str) -> None:
        with pytest.raises(ConfigError, match="^configuration: .* is not a path; give the path of a YAML file."):
            PTMConfig.load(text)
        with pytest.raises(ConfigError, match="^disk: got .*, which names no folder; write disk: /mnt/ssd"):
            PTMConfig(disk=text)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("hunter2 and\nhunter2", "expected a mapping of options, got str; write"),
            ("- hunter2\n", "expected a mapping of options, got list; write"),
            ("hunter2: hunter2\n", "none of its 1 keys is one of a configuration; the keys are: device_memory"),
            ("root: x\n- hunter2: hunter2\n", "not valid YAML: expected <block end>, but found '-' (line 2, column 1)"),
            ("a: *hunter2\n", "not valid YAML: found undefined alias ... (line 1, column 4); correct that line."),
            ("a: !hunter2 b\n", "not valid YAML: could not determine a constructor for the tag ... (line 1, column 4)"),
            ("a: 'hunter2\n", "not valid YAML: found unexpected end of stream (line 2, column 1); correct that line."),
        ],
    )
    def test_nothing_of_a_file_that_is_no_configuration_is_shown(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "key"
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            PTMConfig.load(file)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            *(
                (option, value)
                for option in ("host_memory", "page_size")
                for value in ("9" * 5000, 10**4000, "9" * 30 + "GB")
            ),
            *(
                (option, value)
                for option in ("token_slices", "pipeline", "pseudo_to_real")
                for value in ("9" * 5000, 10**400)
            ),
            ("disk", {"paths": "/tmp", "limit": "9" * 5000}),
            ("update", "x" * 5000),
            ("shard", "x" * 5000),
            ("host_memory", "1e400GB"),
        ],
    )
    def test_values_that_are_long_are_refused_in_short(self, option: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=rf"^{option}[.a-z]*: .*[;:] (use|write) ") as caught:
            PTMConfig(**{option: value})
        assert len(str(caught.value)) < 300

    def test_what_is_no_mapping_either(self) -> None:
        with pytest.raises(ConfigError, match="expected a mapping of options, got int 3; write lines such as"):
            PTMConfig.load(3)  # type: ignore[arg-type]

    def test_an_unknown_key_with_a_suggestion(self) -> None:
        message = f"configuration: unknown key 'host_mem'; did you mean 'host_memory'? The keys are: {OPTIONS}."
        with pytest.raises(ConfigError, match=re.escape(message)):
            PTMConfig.load({"host_mem": "1GiB"})

    @pytest.mark.parametrize(
        ("key", "option"),
        [("gpu_memory", "device_memory"), ("max-ram", "host_memory"), ("nvme_path", "disk"), ("params", None)],
    )
    def test_what_others_call_an_option(self, key: str, option: str | None) -> None:
        hint = f"did you mean '{option}'? " if option else LATER
        message = f"configuration: unknown key '{key}'; {hint}The keys are: {OPTIONS}."
        with pytest.raises(ConfigError, match=re.escape(message)):
            PTMConfig.load({key: "1GiB"})

    def test_an_unknown_key_like_no_other(self) -> None:
        with pytest.raises(ConfigError, match=f"^configuration: unknown key 7; {LATER}The keys are: {OPTIONS}."):
            PTMConfig.load({7: 1})  # type: ignore[dict-item]

    def test_options_beside_the_section(self) -> None:
        with pytest.raises(ConfigError, match="^configuration: disk is outside of the section 'ptm_config'; move it"):
            PTMConfig.load({"ptm_config": {"host_memory": "1GiB"}, "disk": "/a"})


@pytest.mark.usefixtures("small_machine")
class TestResolve:
    def test_defaults_without_a_device(self) -> None:
        resolved = resolve(PTMConfig(), device_total_bytes=None)
        assert resolved == ResolvedConfig(
            page_bytes=4 * MIB,
            host_bytes=4 * GIB,
            device_bytes=None,
            disk_paths=(),
            disk_limit_bytes=None,
            disk_verify=False,
            update="exact",
            max_staleness=None,
            master_weights=None,
            shard="auto",
            origins={
                "device_memory": "no device",
                "host_memory": "derived from 80% of 5.00 GiB available; the cgroup v1 limit is 8.00 GiB",
                "disk": "off: no path given",
                "update": "default",
                "page_size": "default",
                "master_weights": "default",
                "shard": "default",
            },
        )

    def test_defaults_with_a_device(self) -> None:
        resolved = resolve(PTMConfig(), device_total_bytes=10 * GIB)
        assert resolved.device_bytes == 9 * GIB
        assert resolved.origins["device_memory"] == "derived from 90% of the card's 10.00 GiB"

    @pytest.mark.parametrize(("free", "derived"), [(9.5, 9 * GIB), (9, 9 * GIB), (4, 4 * GIB * 9 // 10)])
    def test_the_default_goes_by_what_others_leave_of_the_card(self, free: float, derived: int) -> None:
        resolved = resolve(PTMConfig(), device_total_bytes=10 * GIB, device_free_bytes=int(free * GIB))
        assert resolved.device_bytes == derived
        left = "90% of 4.00 GiB, which others leave of the card's 10.00 GiB"
        whole = "90% of the card's 10.00 GiB"
        assert resolved.origins["device_memory"] == f"derived from {left if free == 4 else whole}"
        given = resolve(PTMConfig(device_memory="8GiB"), device_total_bytes=10 * GIB, device_free_bytes=int(free * GIB))
        assert given.device_bytes == 8 * GIB

    def test_what_is_given(self, tmp_path: Path) -> None:
        config = PTMConfig(
            device_memory="2GiB",
            host_memory="1GiB",
            disk=DiskConfig(paths=(str(tmp_path),), limit="1MiB", verify=True),
            page_size="64KiB",
            master_weights="fp32",
            shard="none",
        )
        resolved = resolve(config, device_total_bytes=10 * GIB)
        assert (resolved.device_bytes, resolved.host_bytes) == (2 * GIB, GIB)
        assert (resolved.disk_paths, resolved.disk_limit_bytes) == ((tmp_path,), MIB)
        assert resolved.disk_verify
        assert f"disk: 1.00 MiB on {tmp_path}, verified (given)" in resolved.lines()
        assert (resolved.page_bytes, resolved.master_weights) == (64 * KIB, "fp32")
        assert resolved.shard == "none"
        assert {option: origin for option, origin in resolved.origins.items() if origin != "given"} == {
            "update": "default"
        }

    def test_shares(self) -> None:
        resolved = resolve(PTMConfig(host_memory="25%", device_memory="50%"), device_total_bytes=10 * GIB)
        assert (resolved.host_bytes, resolved.device_bytes) == (2 * GIB, 5 * GIB)
        assert resolved.origins["host_memory"] == "given, 25% of 8.00 GiB, the cgroup v1 limit"
        assert resolved.origins["device_memory"] == "given, 50% of 10.00 GiB, the card's memory"

    def test_device_memory_without_a_device_is_noted(self) -> None:
        resolved = resolve(PTMConfig(device_memory="2GiB"), device_total_bytes=None)
        assert resolved.device_bytes is None
        assert resolved.origins["device_memory"] == "ignored: no device"

    def test_a_share_below_one_percent(self) -> None:
        assert resolve(PTMConfig(host_memory="0.5%"), device_total_bytes=None).host_bytes == 8 * GIB // 200

    def test_all_of_the_limit_may_be_asked(self) -> None:
        assert resolve(PTMConfig(host_memory="8GiB"), device_total_bytes=None).host_bytes == 8 * GIB

    def test_more_host_memory_than_the_limit(self) -> None:
        message = "host_memory: asked 8.01 GiB, the cgroup v1 limit is 8.00 GiB; set host_memory to at most 8GiB."
        with pytest.raises(BudgetError, match=re.escape(message)):
            resolve(PTMConfig(host_memory="8.01GiB"), device_total_bytes=None)

    def test_what_is_to_be_set_is_not_refused(self) -> None:
        total = 25_286_000_000
        with pytest.raises(BudgetError) as caught:
            resolve(PTMConfig(device_memory="30GB"), device_total_bytes=total)
        text = str(caught.value)
        assert "the card's memory is 23.55 GiB; set device_memory to at most 23.54GiB." in text
        assert resolve(PTMConfig(device_memory="23.54GiB"), device_total_bytes=total).device_bytes == int(23.54 * GIB)

    def test_more_device_memory_than_the_card(self) -> None:
        message = "device_memory: asked 2.00 GiB, the card's memory is 1.00 GiB; set device_memory to at most 1GiB."
        with pytest.raises(BudgetError, match=re.escape(message)):
            resolve(PTMConfig(device_memory="2GiB"), device_total_bytes=GIB)

    @pytest.mark.parametrize(
        ("options", "option"),
        [({"host_memory": "1%"}, "host_memory"), ({"host_memory": "4GiB", "device_memory": "2%"}, "device_memory")],
    )
    def test_a_share_smaller_than_a_page(self, options: dict[str, Any], option: str) -> None:
        with pytest.raises(ConfigError, match=f"^{option}: .* MiB cannot hold one page of 1.00 GiB; raise {option}"):
            resolve(PTMConfig(page_size="1GiB", **options), device_total_bytes=4 * GIB)

    def test_a_derived_budget_smaller_than_a_page(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "available_bytes", lambda: MIB)
        with pytest.raises(ConfigError, match="^host_memory: 819.20 KiB cannot hold one page of 4.00 MiB; raise"):
            resolve(PTMConfig(), device_total_bytes=None)

    def test_lines(self, tmp_path: Path) -> None:
        config = PTMConfig(host_memory="1GiB", disk=DiskConfig(paths=(str(tmp_path),), limit="1MiB"))
        assert resolve(config, device_total_bytes=None).lines() == [
            "device_memory: none (no device)",
            "host_memory: 1.00 GiB (given)",
            f"disk: 1.00 MiB on {tmp_path} (given)",
            "update: exact (default)",
            "page_size: 4.00 MiB (default)",
            "master_weights: none (default)",
            "shard: auto (default)",
        ]

    def test_lines_without_a_disk(self) -> None:
        assert "disk: none (off: no path given)" in resolve(PTMConfig(), device_total_bytes=None).lines()


@pytest.mark.usefixtures("small_machine")
class TestDisk:
    @pytest.fixture(autouse=True)
    def _free_space(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=10 * GIB))

    def resolve(self, *paths: Path, limit: str | int | None = None) -> ResolvedConfig:
        disk = DiskConfig(paths=tuple(str(path) for path in paths), limit=limit)
        return resolve(PTMConfig(disk=disk), device_total_bytes=None)

    def test_limit_is_derived_from_free_space(self, tmp_path: Path) -> None:
        resolved = self.resolve(tmp_path)
        assert resolved.disk_limit_bytes == 9 * GIB
        assert resolved.origins["disk"] == "paths given, limit derived from 90% of 10.00 GiB free"

    def test_paths_on_one_file_system_share_its_space(self, tmp_path: Path) -> None:
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        assert self.resolve(*folders, limit="100%").disk_limit_bytes == 10 * GIB

    def test_more_than_is_free(self, tmp_path: Path) -> None:
        message = (
            "disk.limit: asked 11.00 GiB, the free space of its paths is 10.00 GiB; set disk.limit to at most 10GiB."
        )
        with pytest.raises(BudgetError, match=re.escape(message)):
            self.resolve(tmp_path, limit="11GiB")

    def test_paths_are_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a").mkdir()
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("SCRATCH", str(tmp_path))
        assert self.resolve(Path("~/a")).disk_paths == self.resolve(Path("$SCRATCH/a")).disk_paths == (tmp_path / "a",)

    def test_links_to_one_folder_are_one_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").symlink_to(tmp_path / "a")
        folders = [tmp_path / "a", tmp_path / "b", tmp_path / "b" / ".." / "a"]
        assert self.resolve(*folders).disk_paths == (tmp_path / "a",)

    def test_resolve_checks_the_paths(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=rf"^disk: no file can be made in {tmp_path}/none \(No such file"):
            self.resolve(tmp_path / "none")


class TestCheckDiskPath:
    def test_a_good_folder_is_left_empty(self, tmp_path: Path) -> None:
        check_disk_path(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=rf"^disk: no file can be made in {tmp_path}/none \(No such .*\); set disk.paths to"
        ):
            check_disk_path(tmp_path / "none")

    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.touch()
        with pytest.raises(
            ConfigError, match=rf"^disk: no file can be made in {file} \(Not a directory\); set disk.paths"
        ):
            check_disk_path(file)

    def test_a_file_system_that_takes_no_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(**_: Any) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        with pytest.raises(
            ConfigError, match=rf"^disk: no file can be made in {tmp_path} \(Read-only file system\); set"
        ):
            check_disk_path(tmp_path)
