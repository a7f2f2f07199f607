"""Space on the disk: how much is free, and a reserve for when there is none.

States go into the log first and from there into the file, so they need their size twice. A write that cannot find room
is not begun: a log that cannot be moved any more would keep its space. The reserve covers the space that other programs
take meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine

from ssmd.machine.privatefile import NOLINK
from ssmd.sessions.rows import database
from ssmd.sessions.rows.faults import DiskFull
from ssmd.sessions.rows.holding import stored_bytes
from ssmd.sessions.turn import StoreError

FILE = "reserve"
RESERVE_BYTES = 8 << 20
FOR_REMOVAL = 4 << 20  # part of the reserve for removals, which write first; the rest is for text
_STEP = 1 << 20  # bytes of the reserve given up at once: others may take what is free
LOW_BYTES = 256 << 20  # free space below which the log is kept short, because moving it needs space too
_AMPLE = 4  # times the reserve that must be free to make one
_MARGIN = 1 << 20  # pages of tables and indices that a commit writes beside its states
Result = TypeVar("Result")


def cut(data_dir: Path, left: int) -> bool:
    """Cut a data directory's reserve down to `left` bytes. Return True if that freed space."""
    file = data_dir / FILE
    with contextlib.suppress(OSError):
        if file.stat().st_size > left:
            if left:
                os.truncate(file, left)
            else:
                file.unlink()
            return True
    return False


class DiskSpace:
    """The space of a database on its disk. From any thread, and beside other processes."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine, self._database = engine, file
        self._file = file.with_name(FILE)
        self._wanted = False

    def free(self) -> int:
        """Return the free bytes of the disk; if the system does not report them, more than any disk has."""
        try:
            return shutil.disk_usage(self._file.parent).free
        except OSError:
            return 1 << 62

    def holds(self, nbytes: int, quota: int | None) -> bool:
        """Return True if a commit with `nbytes` of states has room. Raises StoreError."""
        kept = RESERVE_BYTES - self._size() if self._wanted else 0  # given up before, but not for states
        if not nbytes or self.free() - kept >= 2 * nbytes + LOW_BYTES:
            return True
        try:
            log = database.move_log(self._engine, self._database)
        except DiskFull:
            return False
        with database.reading(self._engine, self._database) as connection:
            grows = nbytes - database.free_bytes(connection)
            if quota is not None:  # removed checkpoints leave their pages
                grows -= max(0, stored_bytes(connection) + nbytes - quota)
        return self.free() - kept >= max(0, nbytes + _MARGIN - log) + max(0, grows)

    def tidy(self) -> None:
        """Keep the log short while space is low. Called after a commit, when it is durable."""
        if self.free() < LOW_BYTES:
            with contextlib.suppress(StoreError, OSError):
                database.move_log(self._engine, self._database)

    def for_words(self, work: Callable[[], Result]) -> Result:
        """Do work that needs little room. If it finds none, give up reserve, but not the part for removals."""
        while True:
            try:
                return work()
            except DiskFull:
                if not self.give_up(max(FOR_REMOVAL, self._size() - _STEP)):
                    raise

    def removing(self, work: Callable[[Connection], Result]) -> Result:
        """Run a write transaction that removes rows on a full disk, and give the space back. Raises StoreError."""
        self.give_up(0)
        with contextlib.suppress(StoreError):
            database.shorten_log(self._engine, self._database)
        with database.sparing(self._engine, self._database) as connection:
            done = work(connection)
        with contextlib.suppress(DiskFull):  # then the next commits use the freed space
            database.shrink(self._engine, self._database)
        return done

    def reserve(self) -> bool:
        """Keep a reserve from now on. Return False if there is no room for one; `restock` tries again."""
        self._wanted = True
        return self.restock()

    def restock(self) -> bool:
        """Make the reserve again if one is kept and there is room. Return True if there is room."""
        try:
            if self._wanted and self._size() != RESERVE_BYTES:
                if self.free() < _AMPLE * RESERVE_BYTES:
                    return False
                self._make()
        except OSError:
            return False
        return self.free() >= RESERVE_BYTES

    def _make(self) -> None:
        """Write the reserve, of random bytes: a file system may store zeros without taking space."""
        made = self._file.with_name(f".{FILE}-{os.getpid()}")
        for left in self._file.parent.glob(f".{FILE}-*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        try:
            with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NOLINK, 0o600), "wb") as f:
                f.write(os.urandom(RESERVE_BYTES))
                f.flush()
                os.fsync(f.fileno())
            made.replace(self._file)
        finally:
            made.unlink(missing_ok=True)

    def give_up(self, left: int) -> bool:
        """Cut the reserve down to `left` bytes. Return True if that freed space."""
        given = cut(self._file.parent, left)
        self._wanted |= given  # a reserve of any process is made again
        return given

    def _size(self) -> int:
        """Return the present size of the reserve in bytes."""
        try:
            return self._file.stat().st_size
        except OSError:
            return 0
