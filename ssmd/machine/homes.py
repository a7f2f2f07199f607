"""The folders that the system has for a user's programs, and ssmd's in them."""

from __future__ import annotations

from pathlib import Path

import platformdirs

_NAME = "ssmd"


def data() -> Path:
    """The folder of sessions and models, as `~/.local/share/ssmd`."""
    return Path(platformdirs.user_data_dir(_NAME, appauthor=False))  # else Windows has ssmd\\ssmd


def settings() -> Path:
    """The folder of the settings file, as `~/.config/ssmd`."""
    return Path(platformdirs.user_config_dir(_NAME, appauthor=False))


def caches() -> Path:
    """The folder of what only saves time, as `~/.cache/ssmd`."""
    return Path(platformdirs.user_cache_dir(_NAME, appauthor=False))
