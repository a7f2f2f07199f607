"""The data directory and the models directory of a command, without loading the settings if possible.

To read and check all settings takes longer than a request to a daemon. If a settings file exists, it is read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ssmd.machine import homes


def data_dir(flag: Path | None) -> Path:
    """Return the data directory, as `Settings(data_dir=flag).data_dir`. Raises SettingsError."""
    _check_variables()
    given = flag or _variable("SSMD_DATA_DIR")
    if given is None and not _settled():
        given = homes.data()
    if given is None:
        from ssmd.config import Settings

        return Settings().data_dir
    return Path(os.path.abspath(given.expanduser()))


def models_dir(flag: Path | None, data: Path | None) -> Path:
    """Return the models directory, as `Settings(models_dir=flag, data_dir=data).models_dir`. Raises SettingsError."""
    _check_variables()
    given = flag or _variable("SSMD_MODELS_DIR")
    if given is None and not _settled():
        return data_dir(data) / "models"
    if given is None:
        from ssmd.config import Settings

        return Settings(data_dir=data).models_dir
    return Path(os.path.abspath(given.expanduser()))


def _variable(name: str) -> Path | None:
    found = os.environ.get(name)
    return Path(found) if found else None


def _check_variables() -> None:
    """Raise SettingsError if a variable is misspelt: it may be the one that selects the daemon."""
    known = ("SSMD_CONFIG", "SSMD_DATA_DIR", "SSMD_MODELS_DIR", "SSMD_CACHE_DIR")
    given = [name.upper() for name, value in os.environ.items() if value]
    if any(name.startswith("SSMD_") and name not in known for name in given):
        from ssmd.machine.variables import misspelt

        if wrong := "; ".join(misspelt(settings_variables())):
            from ssmd.config import SettingsError

            raise SettingsError(wrong)


def settings_variables() -> list[str]:
    """Return the variables of all settings, in their order.

    The names are read from the text of ssmd/config.py: importing it (pydantic) takes longer than asking a daemon.
    """
    from ssmd.machine.variables import PREFIX

    file = Path(__file__).parent.parent / "config.py"
    if not file.exists():  # an installation of compiled files alone
        from ssmd.config import Settings

        return [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    names = re.findall(r"^    (\w+): .+ = Field\(", file.read_text("utf-8"), re.MULTILINE)
    return [f"{PREFIX}{name.upper()}" for name in names]


def _settled() -> bool:
    """Return True if SSMD_CONFIG, a variable in small letters, or a settings file may set the place."""
    named = ("SSMD_CONFIG", "SSMD_DATA_DIR", "SSMD_MODELS_DIR")
    if any(name.upper() in named and (name == "SSMD_CONFIG" or name not in named) for name in os.environ):
        return True
    return (homes.settings() / "config.toml").exists()
