"""The settings file: TOML that other users cannot write, nor read if it contains a secret."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ssmd.machine import textfile
from ssmd.machine.privatefile import others_read, others_write

MAX_BYTES = 1 << 20


def read_settings(path: Path, secrets: Collection[str]) -> dict[str, Any]:
    """Read a settings file's keys and values. secrets: keys with secret values.

    Raises ValueError that says what to do, and FileNotFoundError if there is no file.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if others_write(found):
                raise ValueError(
                    f"settings file {path} can be written by every user of this computer, so what it says cannot be "
                    f"trusted; look it through, then: chmod go-w {path}"
                )
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"settings file {path} is larger than {MAX_BYTES} bytes")
        values = tomllib.loads(textfile.decode(text))
    except FileNotFoundError:
        raise
    except OSError as err:
        raise ValueError(f"settings file {path} cannot be read: {err.strerror or err}") from err
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as err:
        # The error quotes at most a position, never the text.
        raise ValueError(f"settings file {path} is not TOML: {err}") from None
    if (kept := [key for key in secrets if key in values]) and others_read(found):
        raise ValueError(
            f"settings file {path} holds an {kept[0]} and can be read by other users of this computer; take another "
            f"key, after: chmod 600 {path}"
        )
    return values
