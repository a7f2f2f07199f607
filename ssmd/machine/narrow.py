"""Names of files for libraries that open them by bytes, which are UTF-8 everywhere but on Windows."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

if sys.platform == "win32":
    from ssmd.machine import windows


def narrow(path: Path) -> str:
    """A name under which such a library finds a file, or makes it in a folder that is there.

    Windows reads the bytes in a code page of its own. Beyond ASCII it is asked for the short names (8.3) that it keeps
    beside long ones, which it does not on every disk. Raises OSError where there is none.
    """
    if sys.platform == "win32" and not str(path).isascii():
        for known, rest in ((path, ""), (path.parent, f"\\{path.name}")):
            with contextlib.suppress(OSError):
                name = windows.short_name(known) + rest
                if name.isascii():
                    return name
        raise OSError(f"Windows keeps no short name of {path}; take a folder whose path is of ASCII letters")
    return str(path)
