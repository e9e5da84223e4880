"""Reads a YAML file that a user names. It may be any file, so nothing of a file that is not YAML is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ptm_accel.errors import ConfigError
from ptm_accel.units import format_bytes

MOST_BYTES = 1 << 20
"""No file of options is as long, and /dev/zero is longer."""

_QUOTED = re.compile(r"(['\"])(.*?)\1")
_LONGEST_SIGN = 3
_IN_VALUES = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What PyYAML's constructors raise of values such as the date 2001-99-99."""


def read_yaml(file: Path) -> Any:
    """What a YAML file holds.

    Args:
        file: the file.

    Raises:
        ConfigError: it is missing, cannot be read, or is no YAML. The message starts with its name.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(
                f"{file}: is longer than {format_bytes(MOST_BYTES)}; give the path of a YAML file of options."
            )
        return yaml.safe_load(data.decode("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such file; give the path of a YAML file with ptm_accel's options.") from error
    except UnicodeDecodeError as error:
        reason = f"its byte {error.start} is none of UTF-8's, the codec of YAML"
        raise ConfigError(f"{file}: cannot be read: {reason}; give the path of a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; give the path of a YAML file.") from error
    except RecursionError:
        raise ConfigError(f"{file}: is nested too deeply; write options in one or two levels.") from None
    except yaml.YAMLError as error:
        # Their texts quote the file.
        raise ConfigError(f"{file}: not valid YAML: {_problem(error)}; correct that line.") from None
    except ConfigError:
        raise
    except _IN_VALUES as error:
        reason = f"a value cannot be what it looks like ({type(error).__name__})"
        raise ConfigError(f"{file}: not valid YAML: {reason}; put texts in quotes.") from None


def _problem(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the words of the file."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "it has characters that YAML does not allow"
    mark = error.problem_mark
    problem = _QUOTED.sub(_sign, error.problem or "an error")
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})"


def _sign(quoted: re.Match[str]) -> str:
    """What a parser's text quotes, if it is a sign of YAML or the name of one."""
    return quoted[0] if len(quoted[2]) <= _LONGEST_SIGN or quoted[2].startswith("<") else "..."
