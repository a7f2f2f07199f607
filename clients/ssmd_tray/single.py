"""One tray to a data directory: a lock file, and the socket at which a second one asks the first to show itself."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from ssmd.machine.folder import make_private
from ssmd.machine.lockfile import lock
from ssmd.machine.privatefile import NOLINK

LOCK = "tray.lock"
SOCKET = "tray.sock"
_LONGEST = 100  # bytes of a Unix socket's path, with some to spare


class Single:
    """Held from `take` until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @staticmethod
    def take(data_dir: Path) -> Single | None:
        """Become the only tray of a data directory, which is made if missing. Raises OSError.

        Returns None if another process is its tray.
        """
        make_private(data_dir)
        descriptor = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT | NOLINK, 0o600)
        try:
            if lock(descriptor):
                return Single(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Let another one be it. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def socket_name(data_dir: Path) -> str:
    """Return a path in the data directory, or elsewhere if that is too long; on Windows a pipe's name."""
    named = f"ssmd-tray-{hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]}"
    if sys.platform == "win32":
        return named
    path = str(data_dir / SOCKET)
    if len(os.fsencode(path)) <= _LONGEST:
        return path
    return str(Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / named)
