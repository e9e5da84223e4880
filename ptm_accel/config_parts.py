"""The parts of the configuration that have several values: disk, Pseudo-to-Real, pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ptm_accel.config_checks import (
    AUTO,
    check_choice,
    check_keys,
    check_size,
    count_of,
    delink_of,
    path_texts,
    switch_of,
)
from ptm_accel.errors import ConfigError, shown

MOMENTS = ("copy", "scale", "reset")


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskConfig:
    """Folders for pages on disk, and the bytes that they may take.

    Attributes:
        paths: folders for the scratch files; `~` and environment variables are expanded.
        limit: bytes over all paths together, e.g. `"500GB"`, or a share of their free space; None for 90% of it.
        verify: True compares each page that is read with the CRC-32 of the bytes written; a difference ends the run
            with an error.
    """

    paths: tuple[str, ...]
    limit: str | int | None = None
    verify: bool | str = False

    def __post_init__(self) -> None:
        """Checks the paths' form (not yet whether they exist), the limit and the switch."""
        object.__setattr__(self, "paths", path_texts(self.paths))
        if self.limit is not None and check_size("disk.limit", self.limit) == 0:
            raise ConfigError("disk.limit: 0 B leaves no room for pages; raise it, or leave disk out.")
        object.__setattr__(self, "verify", switch_of("disk.verify", self.verify))

    @classmethod
    def load(cls, value: DiskConfig | str | os.PathLike[str] | Sequence[str] | Mapping[str, Any]) -> DiskConfig:
        """Makes a `DiskConfig` from one path, a list of paths, or a mapping with `paths`, `limit` and `verify`.

        Raises:
            ConfigError: any other type, an unknown key, a limit without paths, or values that cannot be used.
        """
        if isinstance(value, DiskConfig):
            return value
        if isinstance(value, Mapping):
            check_keys(value, [field.name for field in fields(cls)], "disk")
            if value.get("paths") is None:
                raise ConfigError(f"disk: {shown(dict(value))} has no paths; set disk.paths to at least one folder.")
            return cls(**value)
        return cls(paths=path_texts(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class PseudoToRealConfig:
    """Pseudo-to-Real training (M6-10T, arXiv 2110.03888): repeated blocks share their weights until they are delinked.

    Attributes:
        delink: when blocks get their own weights: after a number of steps (an integer), after a fraction of the
            training (below 1), or `"auto"`: when the loss flattens, at the latest after half of the training.
        moments: optimizer state of the delinked blocks. `"copy"`: that of the shared weights. `"scale"`: the same,
            divided as if each block had had its share of the gradient. `"reset"`: none.

    Raises:
        ConfigError: a value that cannot be used.
    """

    delink: str | int | float = AUTO
    moments: str = "scale"

    def __post_init__(self) -> None:
        """Checks both, and takes a number that is given as text."""
        object.__setattr__(self, "delink", delink_of(self.delink))
        check_choice("pseudo_to_real.moments", self.moments, MOMENTS)

    @classmethod
    def load(cls, value: PseudoToRealConfig | Mapping[str, Any] | str | float) -> PseudoToRealConfig:
        """Makes one from a mapping with `delink` and `moments`, or from a value of `delink`.

        Raises:
            ConfigError: an unknown key, or a value that cannot be used.
        """
        if isinstance(value, PseudoToRealConfig):
            return value
        if isinstance(value, Mapping):
            check_keys(value, [field.name for field in fields(cls)], "pseudo_to_real")
            return cls(**value)
        return cls(delink=value)

    def last_linked(self, steps: int) -> int | None:
        """After how many of `steps` steps blocks are delinked; None for `"auto"`."""
        if self.delink == AUTO:
            return None
        assert not isinstance(self.delink, str)
        return self.delink if isinstance(self.delink, int) else max(1, int(self.delink * steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """A pipeline of processes, each of which has a range of the model's decoder layers (TeraPipe, arXiv 2102.07988).

    Attributes:
        stages: the number of stages; the number of processes is a multiple of it.

    Raises:
        ConfigError: a value that cannot be used.
    """

    stages: int | str

    def __post_init__(self) -> None:
        """Checks it, and takes a number that is given as text."""
        stages = count_of(self.stages)
        if stages < 2:
            raise ConfigError(
                f"pipeline.stages: got {shown(self.stages)}; write how many stages there are, at least 2."
            )
        object.__setattr__(self, "stages", stages)

    @classmethod
    def load(cls, value: PipelineConfig | Mapping[str, Any] | int | str) -> PipelineConfig:
        """Makes one from a mapping with `stages`, or from a number of stages.

        Raises:
            ConfigError: an unknown key, or a value that cannot be used.
        """
        if isinstance(value, PipelineConfig):
            return value
        if isinstance(value, Mapping):
            check_keys(value, [field.name for field in fields(cls)], "pipeline")
            if "stages" not in value:
                raise ConfigError("pipeline: it has no stages; write how many there are, at least 2.")
            return cls(**value)
        return cls(stages=value)
