"""The options in environment variables: how launchers tell them to the processes that they start.

`ACCELERATE_USE_PTM=true` switches pages on, as `ACCELERATE_USE_FSDP` does for FSDP; the options follow as `PTM_*`. What
`accelerate launch --use_ptm` sets, a person sets for `torchrun` or plain `python`.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ptm_accel.autoload import SWITCH as SWITCH
from ptm_accel.config import DiskConfig, PipelineConfig, PseudoToRealConfig, PTMConfig
from ptm_accel.config_checks import nearly
from ptm_accel.errors import ConfigError, shown

logger = logging.getLogger(__name__)

CONFIG_FILE = "config_file"
PREFIX = "ptm_"
"""Prefix of the options' flags."""
SWITCH_FLAG = "use_ptm"
"""The launcher's flag that switches pages on."""

TEXT_OPTIONS = {
    "device_memory": "memory that may be used on each GPU, such as 10GB or 80%%",
    "host_memory": "RAM that each process may use, such as 64GB or 50%%",
    "disk": "folder on an SSD for bytes that do not fit; several are separated by commas",
    "disk_limit": "bytes that may be used on disk, such as 500GB",
    "disk_verify": "true compares bytes read from the disk with the CRC of the bytes written",
    "update": "exact, blocking or lock_free",
    "page_size": "unit in which memory is reserved and moved, such as 4MiB",
    "pseudo_to_real": "when blocks that share their weights are delinked: auto, a step, or a fraction of the training",
    "token_slices": "slices of a sequence that a layer computes one after the other; auto for about 2048 tokens each",
    "moments": "optimizer state of delinked blocks: copy, scale or reset",
    "pipeline_stages": "stages that the model is cut into, each in a process of its own",
    "checkpoint_hashes": "true saves and compares CRCs of checkpoints; false does not",
    "master_weights": "fp32 keeps fp32 masters of narrower parameters; none does not",
    "shard": "auto, full or none: whether each of several processes keeps a part of every layer, or all of it",
    "micro_batches": "one_by_one or by_layer: whether all micro-batches of a step go through a layer before the next",
    "max_staleness": "with update lock_free, the most steps by which a parameter may lag in a forward",
}
"""Each option that can be given as text, with what it says in a launcher's help (`%` doubled, as argparse asks for)."""


_IN_PARTS = ("disk", "disk_limit", "disk_verify", "pseudo_to_real", "moments", "pipeline_stages")
"""Options that have parts, each of which is a text of its own."""


def variable_of(option: str) -> str:
    """Returns the environment variable of an option, or of the configuration file."""
    return f"PTM_{option.upper()}"


def is_on(environ: Mapping[str, str]) -> bool:
    """Returns whether pages are switched on.

    Raises:
        ConfigError: the switch is neither on nor off.
    """
    text = environ.get(SWITCH, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{SWITCH}={environ[SWITCH]!r} is neither on nor off; set it to true or false.")


def from_environment(environ: Mapping[str, str]) -> PTMConfig | None:
    """Returns the options that the environment asks for; None if pages are not switched on.

    Raises:
        ConfigError: options that cannot be used, or a variable that is nearly one of an option.
    """
    if not is_on(environ):
        return None
    known = {variable_of(name): name for name in (*TEXT_OPTIONS, CONFIG_FILE)}
    for variable in environ:
        if variable.startswith("PTM_") and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
            if close:
                raise ConfigError(f"{variable} is not an option of ptm_accel; did you mean {close[0]}?")
    texts = {name: environ[variable] for variable, name in known.items() if environ.get(variable)}
    base = PTMConfig.load(texts.pop(CONFIG_FILE, None))
    return overridden(base, texts)


def launched_with(name: str, default: int) -> int:
    """Returns a number that the launcher has set for its processes.

    Args:
        name: of the variable, such as `LOCAL_RANK`.
        default: where it is not set.

    Raises:
        ConfigError: it is not a number.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) is None:
        raise ConfigError(
            f"{name}={shown(text)} in the environment is not a whole number; launch with torchrun or accelerate "
            f"launch, which set it, or unset {name}."
        )
    return int(text)


def to_environment(config: PTMConfig) -> dict[str, str]:
    """Returns the variables from which `from_environment` makes `config` again.

    Raises:
        ConfigError: the path of a disk has a comma.
    """
    found = {name: getattr(config, name) for name in TEXT_OPTIONS if name not in _IN_PARTS}
    if config.disk is not None:
        disk = DiskConfig.load(config.disk)
        commas = [path for path in disk.paths if "," in path]
        if commas:
            raise ConfigError(
                f"disk: {commas[0]!r} has a comma, which only separates folders in flags and variables; write several "
                "as a list, `disk: [/mnt/a, /mnt/b]`, or use another folder."
            )
        found |= {"disk": ",".join(disk.paths), "disk_limit": disk.limit, "disk_verify": disk.verify}
    if config.pseudo_to_real is not None:
        recipe = PseudoToRealConfig.load(config.pseudo_to_real)
        found |= {"pseudo_to_real": recipe.delink, "moments": recipe.moments}
    if config.pipeline is not None:
        found["pipeline_stages"] = PipelineConfig.load(config.pipeline).stages
    return {SWITCH: "true", **{variable_of(name): str(value) for name, value in found.items() if value is not None}}


def agreed(given: PTMConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> PTMConfig:
    """Returns the options that a script gives, or else those of the environment.

    Raises:
        ConfigError: options that cannot be used; both give some, and not the same.
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        launched_with(name, 0)
    asked = from_environment(os.environ)
    if asked is None:
        _tell_of_unread(os.environ)
    if given is None:
        return asked or PTMConfig()
    config = PTMConfig.load(given)
    if asked is not None and asked not in (PTMConfig(), config):
        here, there = config.unlike(asked)
        raise ConfigError(
            f"the script gives the options {here}, and the launcher or the environment (PTM_...) {there}; leave one of "
            "them out."
        )
    return config


_told: set[str] = set()


def _tell_of_unread(environ: Mapping[str, str]) -> None:
    """Says, once of each, which options of the environment do nothing, because pages are not switched on there."""
    unread = [variable_of(name) for name in (*TEXT_OPTIONS, CONFIG_FILE) if environ.get(variable_of(name))]
    new = [variable for variable in unread if variable not in _told]
    _told.update(new)
    if new:
        logger.warning(
            "%s in the environment has no effect without %s=true: the options of the script are used, or the defaults. "
            "Set it as well, or give the options in the script.",
            ", ".join(new),
            SWITCH,
        )


def overridden(config: PTMConfig, texts: Mapping[str, str]) -> PTMConfig:
    """`config` with the options that are given as text, by the names of `TEXT_OPTIONS`, in place of its own.

    Raises:
        ConfigError: options that cannot be used; a limit or check without a disk, moments without Pseudo-to-Real.
    """
    changes: dict[str, Any] = {name: text for name, text in texts.items() if name not in _IN_PARTS}
    disk = DiskConfig.load(config.disk) if config.disk is not None else None
    if "disk" in texts:
        paths = tuple(part.strip() for part in texts["disk"].split(",") if part.strip())
        disk = replace(disk, paths=paths) if disk is not None else DiskConfig(paths=paths)
    for part, what in (("limit", "a limit"), ("verify", "a check")):
        if (text := texts.get(f"disk_{part}")) is not None:
            if disk is None:
                raise ConfigError(f"disk_{part}: {text!r} is {what} without a disk; set disk as well.")
            changed: dict[str, Any] = {part: text}
            disk = replace(disk, **changed)
    recipe = None if config.pseudo_to_real is None else PseudoToRealConfig.load(config.pseudo_to_real)
    if "pseudo_to_real" in texts:
        recipe = replace(recipe or PseudoToRealConfig(), delink=texts["pseudo_to_real"])
    if "moments" in texts:
        if recipe is None:
            raise ConfigError(
                f"moments: {texts['moments']!r} is for delinked blocks, and no blocks are linked; set pseudo_to_real "
                "as well."
            )
        recipe = replace(recipe, moments=texts["moments"])
    if "pipeline_stages" in texts:
        changes["pipeline"] = PipelineConfig(stages=texts["pipeline_stages"])
    return replace(config, **changes, disk=disk, pseudo_to_real=recipe)


# ---- flags -----------------------------------------------------------------------------------------------------------


def is_flag(text: str) -> bool:
    """Returns whether an argument is meant for us."""
    return text.replace("-", "_").startswith((f"__{SWITCH_FLAG}", f"__{PREFIX}"))


def unknown_flag(flag: str, *switches: str) -> str:
    """Returns the message for a flag, as it was typed, that is none of the options' or of `switches`."""
    known = [*switches, *(f"--{PREFIX}{option}" for option in (*TEXT_OPTIONS, CONFIG_FILE))]
    if not switches and flag.replace("-", "_") == f"__{SWITCH_FLAG}":
        return f"{flag} is a flag of accelerate launch; here pages are switched on without it."
    # Without what all have in common, by which any would be close to any.
    names = {name.removeprefix(f"--{PREFIX}"): name for name in known}
    close = nearly(flag[2:].replace("-", "_").removeprefix(PREFIX), list(names))
    hint = f"did you mean {names[close[0]]}?" if close else f"the flags are: {', '.join(known)}."
    return f"unknown flag {flag}; {hint}"


def misplaced_flag(flag: str, script: str) -> str:
    """Returns the message for a flag, as it was typed, that comes after the script and would be passed to it."""
    return f"{flag} comes after the script {script}, and would be passed to it; put it before."


# ---- logging ---------------------------------------------------------------------------------------------------------


def speak() -> None:
    """Lets the messages of ptm_accel be seen on stderr, unless the program has its own idea of logging.

    The resolved options, hints and the summary are information, which Python hides by default.
    """
    logger = logging.getLogger("ptm_accel")
    if logger.handlers or logging.getLogger().handlers or logger.level != logging.NOTSET:
        return
    handler = _BesideBars(sys.stderr)
    handler.setFormatter(logging.Formatter("[ptm_accel] %(message)s"))
    logger.addHandler(handler)
    # Of several processes the first speaks for all; each warns for itself.
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    logger.propagate = False


class _BesideBars(logging.StreamHandler[Any]):
    """Prints above the progress bars of tqdm, which are drawn anew."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        bars = sys.modules.get("tqdm")
        with bars.tqdm.external_write_mode(file=self.stream) if bars is not None else nullcontext():
            super().emit(record)
