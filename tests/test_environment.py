"""The options in environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptm_accel.config import DiskConfig, PTMConfig
from ptm_accel.environment import SWITCH, agreed, from_environment, is_on, overridden, to_environment
from ptm_accel.errors import ConfigError

SIZES = st.one_of(st.none(), st.just("50%"), st.integers(4 << 20, 1 << 40), st.just("64GB"))
FOLDERS = st.lists(st.sampled_from(["/a", "/b c", "~/d", "$E/f"]), min_size=1, max_size=3, unique=True)
DISKS = st.one_of(
    st.none(), st.builds(lambda paths, limit: DiskConfig(paths=tuple(paths), limit=limit), FOLDERS, SIZES)
)


def test_micro_batches_are_told() -> None:
    # Beside none of the options above that it may not stand beside.
    read = from_environment(to_environment(PTMConfig(micro_batches="by_layer")))
    assert read is not None
    assert read.micro_batches == "by_layer"


def test_lock_free_updating_is_told() -> None:
    for staleness in (0, 3):
        read = from_environment(to_environment(PTMConfig(update="lock_free", max_staleness=staleness)))
        assert read is not None
        assert (read.update, read.max_staleness) == ("lock_free", staleness)


@given(
    st.builds(
        PTMConfig,
        device_memory=SIZES,
        host_memory=SIZES,
        disk=DISKS,
        update=st.sampled_from(["exact", "blocking"]),
        page_size=st.sampled_from(["4MiB", 65536]),
        master_weights=st.sampled_from([None, "fp32"]),
        pseudo_to_real=st.sampled_from([None, "auto", 7, 0.25, {"delink": 3, "moments": "reset"}]),
        token_slices=st.sampled_from([None, "auto", 4]),
        checkpoint_hashes=st.booleans(),
        shard=st.sampled_from(["auto", "none"]),
    )
)
def test_what_a_launcher_tells_is_what_a_process_reads(config: PTMConfig) -> None:
    told = to_environment(config)
    assert all(isinstance(value, str) for value in told.values())
    read = from_environment(told)
    assert read is not None
    for option in ("device_memory", "host_memory", "page_size"):
        asked = getattr(config, option)
        assert getattr(read, option) == (None if asked is None else str(asked))
    assert (read.update, read.master_weights) == (config.update, config.master_weights)
    assert (read.pseudo_to_real, read.token_slices) == (config.pseudo_to_real, config.token_slices)
    assert read.checkpoint_hashes is config.checkpoint_hashes
    assert read.shard == config.shard
    if config.disk is None:
        assert read.disk is None
    else:
        disk, there = DiskConfig.load(config.disk), DiskConfig.load(read.disk or [])
        assert there.paths == disk.paths
        assert there.limit == (None if disk.limit is None else str(disk.limit))
        assert there.verify is disk.verify


def test_a_model_in_parts_is_told() -> None:
    told = to_environment(PTMConfig(shard="full"))
    assert told["PTM_SHARD"] == "full"
    assert from_environment(told) == PTMConfig(shard="full")
    with pytest.raises(ConfigError, match=r"\(full\) cannot be combined with pipeline; leave one out"):
        overridden(PTMConfig(shard="full"), {"pipeline_stages": "2"})


def test_stages_are_told() -> None:
    told = to_environment(PTMConfig(pipeline={"stages": 3}))
    assert told["PTM_PIPELINE_STAGES"] == "3"
    assert from_environment(told) == PTMConfig(pipeline=3)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("True", True), (" yes ", True), ("0", False), ("", False)])
def test_the_switch(text: str, on: bool) -> None:
    assert is_on({SWITCH: text}) is on
    assert (from_environment({SWITCH: text, "PTM_HOST_MEMORY": "1GB"}) is None) is not on
    assert not is_on({})


def test_a_switch_that_is_neither() -> None:
    with pytest.raises(ConfigError, match="ACCELERATE_USE_PTM='perhaps' is neither on nor off; set it to true or"):
        is_on({SWITCH: "perhaps"})


def test_a_variable_that_is_nearly_one() -> None:
    with pytest.raises(
        ConfigError, match="PTM_HOST_MEMROY is not an option of ptm_accel; did you mean PTM_HOST_MEMORY?"
    ):
        from_environment({SWITCH: "1", "PTM_HOST_MEMROY": "1GB"})
    assert from_environment({SWITCH: "1", "PTM_SOMETHING_ELSE": "1"}) == PTMConfig()


def test_variables_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("host_memory: 8GB\nupdate: blocking\n")
    read = from_environment({SWITCH: "1", "PTM_CONFIG_FILE": str(file), "PTM_HOST_MEMORY": "4GB"})
    assert read == PTMConfig(host_memory="4GB", update="blocking")


def test_a_disk_given_as_text_keeps_the_limit_and_a_limit_the_disk() -> None:
    base = PTMConfig(disk=DiskConfig(paths=("/a",), limit="1GB", verify=True))
    assert overridden(base, {"disk": "/b, /c"}).disk == DiskConfig(paths=("/b", "/c"), limit="1GB", verify=True)
    assert overridden(base, {"disk_limit": "2GB"}).disk == DiskConfig(paths=("/a",), limit="2GB", verify=True)
    assert overridden(base, {"disk_verify": "false"}).disk == DiskConfig(paths=("/a",), limit="1GB")
    with pytest.raises(ConfigError, match="disk_verify: 'true' is a check without a disk; set disk as well"):
        overridden(PTMConfig(), {"disk_verify": "true"})
    with pytest.raises(ConfigError, match="disk_limit: '2GB' is a limit without a disk; set disk as well"):
        overridden(PTMConfig(), {"disk_limit": "2GB"})


def test_a_path_with_a_comma() -> None:
    with pytest.raises(
        ConfigError, match="disk: '/a,b' has a comma, which only separates folders in flags and variables; write"
    ):
        to_environment(PTMConfig(disk="/a,b"))


def test_options_of_a_script_and_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(None) == PTMConfig()
    assert agreed({"host_memory": "1GB"}) == PTMConfig(host_memory="1GB")
    monkeypatch.setenv(SWITCH, "true")
    assert agreed({"host_memory": "1GB"}) == PTMConfig(host_memory="1GB"), "the launcher has only switched it on"
    monkeypatch.setenv("PTM_HOST_MEMORY", "2GB")
    assert agreed(None) == PTMConfig(host_memory="2GB")
    assert agreed({"host_memory": "2GB"}) == PTMConfig(host_memory="2GB")
    with pytest.raises(ConfigError, match="the script gives the options .*; leave one of them out"):
        agreed({"host_memory": "1GB"})


def test_options_that_do_nothing_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ptm_accel.environment._told", set())
    monkeypatch.delenv(SWITCH, raising=False)
    agreed(None)
    monkeypatch.setenv("PTM_ANOTHER_PROGRAM", "1")
    monkeypatch.setenv("PTM_DISK", "")
    agreed(None)
    assert not caplog.messages
    monkeypatch.setenv("PTM_HOST_MEMORY", "1GB")
    monkeypatch.setenv("PTM_CONFIG_FILE", "/nowhere.yaml")
    for _ in range(2):
        assert agreed({"host_memory": "2GB"}) == PTMConfig(host_memory="2GB")
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "PTM_HOST_MEMORY, PTM_CONFIG_FILE in the environment has no effect without ACCELERATE_USE_PTM=true"
    ]
    caplog.clear()
    monkeypatch.setenv("PTM_UPDATE", "blocking")
    monkeypatch.setenv(SWITCH, "off")
    agreed(None)
    assert [message.split()[0] for message in caplog.messages] == ["PTM_UPDATE"]


def test_options_that_are_read_are_not_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ptm_accel.environment._told", set())
    monkeypatch.setenv(SWITCH, "true")
    monkeypatch.setenv("PTM_HOST_MEMORY", "1GB")
    assert agreed(None) == PTMConfig(host_memory="1GB")
    assert not caplog.messages


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("text", ["x", "", "1.5", "9" * 5000])
def test_a_number_of_the_launcher_that_is_none(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"^{name}='.*' in the environment is not a whole number; launch with"):
        agreed({"host_memory": "1GiB"})
