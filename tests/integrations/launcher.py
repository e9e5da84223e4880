"""accelerate's launcher with our flags, in this process."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from accelerate.commands import launch
from accelerate.commands.config import config_args

from ptm_accel.environment import CONFIG_FILE, TEXT_OPTIONS


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """accelerate's launcher with the flags; as it was afterwards."""
    from ptm_accel.integrations.accelerate.launching import extend_config, extend_launch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_args, "ClusterConfig", config_args.ClusterConfig)
    for name in ("launch_command", "launch_command_parser", "_validate_launch_command"):
        monkeypatch.setattr(launch, name, getattr(launch, name))
    monkeypatch.setattr(launch, "options_to_group", dict(launch.options_to_group))
    # A configuration of whoever runs this must not count.
    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "none.yaml"))
    for name in (*(f"PTM_{option.upper()}" for option in (*TEXT_OPTIONS, CONFIG_FILE)), "ACCELERATE_USE_PTM"):
        # Set and taken away, so that what a test sets is taken away as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    extend_config(config_args)
    extend_launch(launch)
    return launch
