"""File names for libraries that open files by byte strings, which are UTF-8 on every system but Windows."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

if sys.platform == "win32":
    from ssmd.machine import windows


def narrow(path: Path) -> str:
    """Return a name by which such a library can open a file, or make it in an existing folder.

    Windows decodes the bytes with a code page of its own. So a name beyond ASCII is replaced by its short name (8.3),
    which Windows does not keep on every disk. Raises OSError without a short name.
    """
    if sys.platform == "win32" and not str(path).isascii():
        for known, rest in ((path, ""), (path.parent, f"\\{path.name}")):
            with contextlib.suppress(OSError):
                name = windows.short_name(known) + rest
                if name.isascii():
                    return name
        raise OSError(f"Windows keeps no short name of {path}; use a folder whose path has only ASCII characters")
    return str(path)
