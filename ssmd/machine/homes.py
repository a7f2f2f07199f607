"""The folders that the system has for a user's programs, and ssmd's in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import platformdirs

_NAME = "ssmd"


class HomeError(ValueError):
    """This user has no home directory; the message says what to set."""


def data() -> Path:
    """The folder of sessions and models, as `~/.local/share/ssmd`."""
    return _found(platformdirs.user_data_dir)


def settings() -> Path:
    """The folder of the settings file, as `~/.config/ssmd`."""
    return _found(platformdirs.user_config_dir)


def caches() -> Path:
    """The folder of what only saves time, as `~/.cache/ssmd`."""
    return _found(platformdirs.user_cache_dir)


def _found(folder: Callable[..., str]) -> Path:
    try:
        return Path(folder(_NAME, appauthor=False))  # else Windows has ssmd\\ssmd
    except RuntimeError as err:
        raise HomeError("this user has no home directory: set HOME to a folder of theirs") from err
