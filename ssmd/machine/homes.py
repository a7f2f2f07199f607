"""ssmd's folders in the user's folders for data, settings and caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import platformdirs

_NAME = "ssmd"


class HomeError(ValueError):
    """This user has no home directory; the message says what to set."""


def data() -> Path:
    """Return the folder of sessions and models, such as `~/.local/share/ssmd`."""
    return _found(platformdirs.user_data_dir)


def settings() -> Path:
    """Return the folder of the settings file, such as `~/.config/ssmd`."""
    return _found(platformdirs.user_config_dir)


def caches() -> Path:
    """Return the folder of caches, such as `~/.cache/ssmd`."""
    return _found(platformdirs.user_cache_dir)


def _found(folder: Callable[..., str]) -> Path:
    try:
        return Path(folder(_NAME, appauthor=False))  # else Windows has ssmd\\ssmd
    except RuntimeError as err:
        raise HomeError("this user has no home directory: set HOME to a folder of theirs") from err
