"""The options a user sets, and their values on this machine.

`PTMConfig` is the user's request: plain data, checked when it is made, the same from a YAML file, a dict or Python.
`resolve` turns it into bytes for one machine: a `ResolvedConfig`, which also tells where each value came from.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

import ptm_accel.machine as machine
from ptm_accel.config_checks import AUTO as AUTO
from ptm_accel.config_checks import (
    check_choice,
    check_holds_a_page,
    check_keys,
    check_size,
    expand,
    is_path,
    nearly,
    slices_of,
    staleness_of,
    switch_of,
)
from ptm_accel.config_files import read_yaml
from ptm_accel.config_parts import MOMENTS as MOMENTS
from ptm_accel.config_parts import DiskConfig as DiskConfig
from ptm_accel.config_parts import PipelineConfig as PipelineConfig
from ptm_accel.config_parts import PseudoToRealConfig as PseudoToRealConfig
from ptm_accel.errors import BudgetError, ConfigError, shown
from ptm_accel.units import format_bytes, format_most, parse_bytes

DEFAULT_PAGE_SIZE = "4MiB"
PAGE_MULTIPLE_BYTES = 4096
"""Pages are multiples of this, as direct disk transfers ask for."""

HOST_SHARE = "80%"
"""Default `host_memory`, as a share of what is available: the rest is for activations, Python and page cache."""
DEVICE_SHARE = "90%"
"""Default `device_memory`, as a share of the card: the rest is for the driver's context and fragments."""
DISK_SHARE = "90%"
"""Default `disk.limit`, as a share of the free space."""

EXACT = "exact"
BLOCKING = "blocking"
LOCK_FREE = "lock_free"
UPDATE_MODES = (EXACT, BLOCKING, LOCK_FREE)
MASTER_WEIGHTS = ("fp32", "none")
FULL = "full"
SHARD_MODES = (AUTO, FULL, "none")
ONE_BY_ONE = "one_by_one"
BY_LAYER = "by_layer"
BY_LAYER_INEXACT = "by_layer_inexact"
MICRO_BATCHES = (ONE_BY_ONE, BY_LAYER, BY_LAYER_INEXACT)
YAML_SECTION = "ptm_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class PTMConfig:
    """The options. Each has a default that is derived on the machine (`resolve`), so `PTMConfig()` is complete.

    Sizes are bytes as int, or text such as `"10GB"` (decimal), `"512MiB"` (binary) or `"80%"` (a share).

    Attributes:
        device_memory: memory that may be used on the GPU; a share is of the card. Default: 90% of the card, or of the
            part that other processes leave free if that is less.
        host_memory: RAM that each process may use; a share is of the machine's or container's limit, divided by the
            processes that train on the machine. Default: 80% of the RAM that is available at the start.
        disk: scratch folders, or `DiskConfig` (or a mapping) for a limit. Default: no disk.
        update: `"exact"`: the results of a run without pages; updates overlap with compute. `"blocking"`: the same
            results; the whole update is carried out within `optimizer.step()`. `"lock_free"`: other results; training
            does not wait for updates, for state on a disk that is slower than compute.
        page_size: the unit in which memory is reserved and moved; a power of two and a multiple of 4096 bytes.
        master_weights: `"fp32"` keeps fp32 masters of low-precision parameters; None or `"none"` does not.
        pseudo_to_real: repeated blocks share their weights at first: a `PseudoToRealConfig`, or a mapping of its
            values. Default: they never share.
        token_slices: the number of slices in which each decoder layer computes a sequence, one after the other. A layer
            holds the activations of one slice. `"auto"`: slices of about 2048 tokens. Default: whole sequences.
        pipeline: the model is cut into stages, each in a process of its own: a `PipelineConfig`, a mapping of its
            values, or the number of stages. Default: each process has the whole model.
        checkpoint_hashes: True saves checkpoints with CRCs of their files, and compares the files with them before a
            run resumes. False does neither.
        shard: for several processes. `"full"`: each keeps a part of the parameters, gradients and optimizer state of
            every layer. `"none"`: each keeps all of them. `"auto"`: `"full"` only if a budget is too small for all.
        micro_batches: for gradient accumulation in the Trainer. `"by_layer"`: all micro-batches of a step go through a
            layer before the next one, with the bits of `"one_by_one"`. `"by_layer_inexact"`: also if the results differ
            by rounding (tied embeddings) or by random numbers (dropout).
        max_staleness: required with `update="lock_free"`: the largest number of steps by which a parameter may lag in a
            forward. 0 gives the results of `"exact"`.

    Raises:
        ConfigError: a value that does not parse, is not available, or contradicts another.
    """

    device_memory: str | int | None = None
    host_memory: str | int | None = None
    disk: DiskConfig | str | list[str] | dict[str, Any] | None = None
    update: str = EXACT
    page_size: str | int = DEFAULT_PAGE_SIZE
    master_weights: str | None = None
    pseudo_to_real: PseudoToRealConfig | dict[str, Any] | str | float | None = None
    token_slices: str | int | None = None
    pipeline: PipelineConfig | dict[str, Any] | int | str | None = None
    checkpoint_hashes: bool | str = True
    shard: str = AUTO
    micro_batches: str = ONE_BY_ONE
    max_staleness: int | str | None = None

    def __post_init__(self) -> None:
        """Checks each option, and the options against one another."""
        page_bytes = _check_page_size(self.page_size)
        for option, value in (("device_memory", self.device_memory), ("host_memory", self.host_memory)):
            if value is not None:
                check_holds_a_page(option, check_size(option, value), page_bytes, value)
        if self.disk is not None:
            object.__setattr__(self, "disk", DiskConfig.load(self.disk))
        check_choice("update", self.update, UPDATE_MODES)
        if self.master_weights is not None:
            check_choice("master_weights", self.master_weights, MASTER_WEIGHTS)
        if self.master_weights == "none":
            object.__setattr__(self, "master_weights", None)
        if self.pseudo_to_real is not None:
            object.__setattr__(self, "pseudo_to_real", PseudoToRealConfig.load(self.pseudo_to_real))
        if self.token_slices is not None:
            object.__setattr__(self, "token_slices", slices_of(self.token_slices))
        object.__setattr__(self, "checkpoint_hashes", switch_of("checkpoint_hashes", self.checkpoint_hashes))
        if self.pipeline is not None:
            object.__setattr__(self, "pipeline", PipelineConfig.load(self.pipeline))
            self._refuse_beside("pipeline: the stages of a pipeline", "pseudo_to_real", "token_slices")
        if self.shard == "node":
            raise ConfigError(
                "shard: node (layers cut over the processes of each machine, and whole on every machine) is not "
                "supported yet; write shard: full, which cuts them over all processes."
            )
        check_choice("shard", self.shard, SHARD_MODES)
        if self.shard == FULL:
            self._refuse_beside("shard: layers cut over processes (full)", "pipeline", "pseudo_to_real", "token_slices")

        check_choice("micro_batches", self.micro_batches, MICRO_BATCHES)
        if self.micro_batches != ONE_BY_ONE:
            self._refuse_beside("micro_batches: layers that run by layer", "pipeline", "pseudo_to_real", "token_slices")
            if self.shard == FULL:
                raise ConfigError(
                    "micro_batches: layers that run by layer cannot be cut over processes (shard: full); leave one out."
                )
        self._check_lock_free()

    def _check_lock_free(self) -> None:
        """Checks which options `update: lock_free` is combined with, and `max_staleness`, which is for it alone."""
        if self.max_staleness is not None:
            object.__setattr__(self, "max_staleness", staleness_of(self.max_staleness))
            if self.update != LOCK_FREE:
                raise ConfigError("max_staleness: it is for update: lock_free; set that, or leave max_staleness out.")
        if self.update == LOCK_FREE:
            self._refuse_beside("update: lock_free", "pipeline", "pseudo_to_real")
            if self.shard == FULL or self.micro_batches != ONE_BY_ONE:
                other = "shard: full" if self.shard == FULL else f"micro_batches: {self.micro_batches}"
                raise ConfigError(f"update: lock_free cannot be combined with {other}; leave one out.")
            if self.max_staleness is None:
                raise ConfigError(
                    "max_staleness: with update: lock_free, set how many steps a parameter may lag, such as 1; 0 "
                    "gives the numbers of exact."
                )

    def _refuse_beside(self, what: str, *others: str) -> None:
        """Refuses options that cannot be combined with another, which `what` names first."""
        for name in others:
            if getattr(self, name) is not None:
                raise ConfigError(f"{what} cannot be combined with {name}; leave one out.")

    @classmethod
    def load(cls, value: PTMConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> PTMConfig:
        """Makes a configuration from the argument `ptm_config` of a caller.

        Args:
            value: None (all defaults), a `PTMConfig`, a mapping of options, or the path of a YAML file with the
                options, at its top or in a section `ptm_config:`.

        Raises:
            ConfigError: a file that is missing or not YAML, something that is not a mapping, an unknown key, or
                values that cannot be used. The message starts with the file's name where there is one.
        """
        if isinstance(value, PTMConfig):
            return value
        if value is None:
            return cls()
        if isinstance(value, str | os.PathLike):
            text = expand(os.fspath(value))
            if not is_path(text):
                raise ConfigError(f"configuration: {shown(text)} is not a path; give the path of a YAML file.")
            return cls._from_file(Path(text))
        return cls._from_mapping(value)

    def unlike(self, other: PTMConfig) -> tuple[str, str]:
        """Returns the options in which another configuration differs, with the values that they have here and there."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        here, there = (", ".join(f"{name}={getattr(each, name)!r}" for name in names) for each in (self, other))
        return here, there

    @classmethod
    def _from_file(cls, file: Path) -> PTMConfig:
        content = read_yaml(file)
        try:
            cls._refuse_foreign(content)
            # A file with everything commented out asks for the defaults.
            return cls._from_mapping({} if content is None else content)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def _refuse_foreign(cls, content: object) -> None:
        """Refuses a file that is not a configuration, without showing any of it."""
        known = [*(field.name for field in fields(cls)), YAML_SECTION]
        if content is not None and not isinstance(content, Mapping):
            raise ConfigError(
                f"configuration: expected a mapping of options, got {type(content).__name__}; write lines such as "
                "'host_memory: 16GiB'."
            )
        if content and not any(key in known or nearly(key, known) for key in content):
            raise ConfigError(
                f"configuration: none of its {len(content)} keys is one of a configuration; the keys are: "
                f"{', '.join(known)}."
            )

    @classmethod
    def _from_mapping(cls, value: object) -> PTMConfig:
        known = [field.name for field in fields(cls)]
        if isinstance(value, Mapping) and YAML_SECTION in value:
            beside = [key for key in value if key in known]
            if beside:
                raise ConfigError(
                    f"configuration: {', '.join(beside)} is outside of the section {YAML_SECTION!r}; move it inside."
                )
            section = value[YAML_SECTION]
            value = {} if section is None else section
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"configuration: expected a mapping of options, got {type(value).__name__} {shown(value)}; "
                f"write lines such as 'host_memory: 16GiB'."
            )
        check_keys(value, known, "configuration")
        return cls(**value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """Options, resolved on this machine.

    Attributes:
        page_bytes: the page size.
        host_bytes: the budget of the host tier.
        device_bytes: the budget of the device tier; None without a device.
        disk_paths: the folders for scratch files, checked; empty without a disk tier.
        disk_limit_bytes: the budget of the disk tier over all paths; None without a disk tier.
        disk_verify: whether bytes read there are compared with the CRC of the bytes written.
        update: how updates are done.
        max_staleness: the most steps by which a parameter lags, with lock-free updates; None without them.
        master_weights: `"fp32"` or None.
        shard: the part of each layer that each of several processes keeps.
        origins: for each option, where its value came from: `"given"`, `"default"`, `"derived from ..."`, or why it
            does not apply.
    """

    page_bytes: int
    host_bytes: int
    device_bytes: int | None
    disk_paths: tuple[Path, ...]
    disk_limit_bytes: int | None
    disk_verify: bool
    update: str
    max_staleness: int | None
    master_weights: str | None
    shard: str
    origins: dict[str, str]

    def lines(self) -> list[str]:
        """Returns one line per option, with its value and origin, for the log."""
        disk = ", ".join(str(path) for path in self.disk_paths)
        verified = ", verified" if self.disk_verify else ""
        values = {
            "device_memory": _show(self.device_bytes),
            "host_memory": _show(self.host_bytes),
            "disk": f"{_show(self.disk_limit_bytes)} on {disk}{verified}" if self.disk_paths else "none",
            "update": self.update
            + ("" if self.max_staleness is None else f", at most {self.max_staleness} steps behind"),
            "page_size": _show(self.page_bytes),
            "master_weights": self.master_weights or "none",
            "shard": self.shard,
        }
        return [f"{option}: {value} ({self.origins[option]})" for option, value in values.items()]


def resolve(
    config: PTMConfig,
    *,
    device_total_bytes: int | None,
    device_free_bytes: int | None = None,
    processes: int = 1,
) -> ResolvedConfig:
    """Turns the options into bytes on this machine, and checks the disk paths.

    Args:
        config: what was asked.
        device_total_bytes: memory of the accelerator; None on a machine without one, where `device_memory` is
            ignored, since one file of options may serve several machines.
        device_free_bytes: the part of it that other processes leave free, if known.
        processes: how many on this machine train alike; each gets its part of a share, and sizes are for each.

    Raises:
        BudgetError: more is asked than the machine or its control group has.
        ConfigError: a disk path that cannot be used, or a budget smaller than a page.
    """
    host_bytes, host_origin = _resolve_host(config.host_memory, processes)
    device_bytes, device_origin = _resolve_device(config.device_memory, device_total_bytes, device_free_bytes)
    disk_paths, disk_limit_bytes, disk_origin = _resolve_disk(config, processes)
    page_bytes = parse_bytes(config.page_size)
    check_holds_a_page("host_memory", host_bytes, page_bytes)
    if device_bytes is not None:
        check_holds_a_page("device_memory", device_bytes, page_bytes)
    default = PTMConfig()
    return ResolvedConfig(
        page_bytes=page_bytes,
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        disk_paths=disk_paths,
        disk_limit_bytes=disk_limit_bytes,
        disk_verify=config.disk is not None and bool(DiskConfig.load(config.disk).verify),
        update=config.update,
        max_staleness=staleness(config),
        master_weights=config.master_weights,
        shard=config.shard,
        origins={
            "device_memory": device_origin,
            "host_memory": host_origin,
            "disk": disk_origin,
            "update": "default" if config.update == default.update else "given",
            "page_size": "default" if page_bytes == parse_bytes(default.page_size) else "given",
            "master_weights": "default" if config.master_weights is None else "given",
            "shard": "default" if config.shard == default.shard else "given",
        },
    )


def check_machine(config: PTMConfig, *, processes: int = 1) -> None:
    """Checks the options as far as possible before any process trains: the memory of this machine, and the folders.

    Args:
        config: what was asked.
        processes: how many on this machine train alike.

    Raises:
        BudgetError: more is asked than the machine or its control group has.
        ConfigError: a disk path that cannot be used, or a budget smaller than a page.
    """
    if config.host_memory is not None:
        host_bytes, _ = _resolve_host(config.host_memory, processes)
        check_holds_a_page("host_memory", host_bytes, parse_bytes(config.page_size), config.host_memory)
    # Some variables in paths are for the processes to put in, such as LOCAL_RANK.
    if config.disk is not None and not any("$" in expand(text) for text in DiskConfig.load(config.disk).paths):
        _resolve_disk(config, processes)


def staleness(config: PTMConfig) -> int | None:
    """Returns the most steps by which a parameter lags, with lock-free updates; None without them."""
    return None if config.max_staleness is None else int(config.max_staleness)


def check_kind(config: object) -> None:
    """Refuses a value that is not a `PTMConfig`."""
    if config is not None and not isinstance(config, PTMConfig):
        raise ConfigError(
            f"configuration: expected a PTMConfig, got {type(config).__name__} {shown(config)}; pass "
            "PTMConfig.load(...) of it."
        )


def check_disk_path(path: Path) -> None:
    """Checks that a scratch file can be made in a folder, by making one.

    Raises:
        ConfigError: the folder does not exist, is not a folder, or nothing can be written there.
    """
    try:
        # Permissions do not tell of read-only or full file systems, so a file is really made (unnamed, so that
        # nothing is left behind).
        with tempfile.TemporaryFile(dir=path) as scratch:
            scratch.write(b"\0")
            scratch.flush()
    except OSError as error:
        raise ConfigError(
            f"disk: no file can be made in {path} ({error.strerror}); set disk.paths to an existing, writable folder."
        ) from error


def _resolve_host(asked: str | int | None, processes: int) -> tuple[int, str]:
    limit = machine.host_limit()
    if asked is not None:
        return _given("host_memory", asked, limit.bytes // processes, f"the {limit.origin}{_each(processes)}")
    available = machine.available_bytes()
    return parse_bytes(HOST_SHARE, total_bytes=available // processes), (
        f"derived from {HOST_SHARE} of {format_bytes(available)} available{_each(processes)}; "
        f"the {limit.origin} is {format_bytes(limit.bytes)}"
    )


def _resolve_device(asked: str | int | None, total_bytes: int | None, free_bytes: int | None) -> tuple[int | None, str]:
    if total_bytes is None:
        return None, "no device" if asked is None else "ignored: no device"
    if asked is not None:
        return _given("device_memory", asked, total_bytes, "the card's memory")
    nbytes, of = parse_bytes(DEVICE_SHARE, total_bytes=total_bytes), f"the card's {format_bytes(total_bytes)}"
    if free_bytes is not None and free_bytes < nbytes:
        nbytes = parse_bytes(DEVICE_SHARE, total_bytes=free_bytes)
        of = f"{format_bytes(free_bytes)}, which others leave of {of}"
    return nbytes, f"derived from {DEVICE_SHARE} of {of}"


def _resolve_disk(config: PTMConfig, processes: int) -> tuple[tuple[Path, ...], int | None, str]:
    if config.disk is None:
        return (), None, "off: no path given"
    disk = DiskConfig.load(config.disk)
    # A folder that is named twice, or by a link as well, is one folder.
    paths = tuple(dict.fromkeys(Path(os.path.realpath(expand(text))) for text in disk.paths))
    for path in paths:
        check_disk_path(path)
    # Paths on one file system share its free space, so each file system counts once.
    file_systems = {path.stat().st_dev: path for path in paths}
    free_bytes = sum(psutil.disk_usage(str(path)).free for path in file_systems.values()) // processes
    if disk.limit is not None:
        return paths, *_given("disk.limit", disk.limit, free_bytes, f"the free space of its paths{_each(processes)}")
    origin = f"paths given, limit derived from {DISK_SHARE} of {format_bytes(free_bytes)} free{_each(processes)}"
    return paths, parse_bytes(DISK_SHARE, total_bytes=free_bytes), origin


def _each(processes: int) -> str:
    return f", over {processes} processes" if processes > 1 else ""


def _given(option: str, asked: str | int, total_bytes: int, name: str) -> tuple[int, str]:
    """Returns the bytes of an option that was given, and where they come from.

    Args:
        option: its name.
        asked: its value.
        total_bytes: the most that there is.
        name: what that is.

    Raises:
        BudgetError: it asks for more.
    """
    nbytes, total = check_size(option, asked, total_bytes=total_bytes), format_bytes(total_bytes)
    if nbytes > total_bytes:
        most = format_most(total_bytes)
        raise BudgetError(f"{option}: asked {format_bytes(nbytes)}, {name} is {total}; set {option} to at most {most}.")
    return nbytes, f"given, {asked} of {total}, {name}" if str(asked).strip().endswith("%") else "given"


def _check_page_size(value: str | int) -> int:
    try:
        page_bytes = parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"page_size: {error}") from error
    if page_bytes < PAGE_MULTIPLE_BYTES or page_bytes & (page_bytes - 1):
        raise ConfigError(
            f"page_size: {shown(value)} is {page_bytes} B, which is not a power of two and a multiple of "
            f"{PAGE_MULTIPLE_BYTES} B; use a size such as {DEFAULT_PAGE_SIZE!r}."
        )
    return page_bytes


def _show(nbytes: int | None) -> str:
    return "none" if nbytes is None else format_bytes(nbytes)
