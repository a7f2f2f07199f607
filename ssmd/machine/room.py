"""Room on the disk: a file written for one client must leave room for the turns of others."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any

from ssmd.machine.privatefile import PLAIN
from ssmd.machine.size import show_size

SPARE_BYTES = 32 << 20  # room to leave for the turns of others


def check_room(folder: Path, needed: int) -> None:
    """Check that a folder's disk has `needed` bytes free. Raises OSError if not."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"the disk has {show_size(free)} free, of {show_size(needed)} that it takes")


class SparingFile(io.FileIO):
    """A private, unbuffered file. A write or growth that would leave less than `spare` bytes free raises OSError."""

    def __init__(self, file: Path, spare: int) -> None:
        super().__init__(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | PLAIN, 0o600), "w+")
        self._folder, self._spare = file.parent, spare

    def write(self, data: Any, /) -> int:
        check_room(self._folder, memoryview(data).nbytes + self._spare)
        return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        """Set the file's size. The disk must have all of it free, though the file does not fill it yet."""
        check_room(self._folder, (size or 0) + self._spare)
        return super().truncate(size)
