"""Room on the disk: how much there is, and a reserve that is given up when there is none.

States come into the log first and from there into the file, so they need their size twice. What is sure to find no
room is not begun: a log that cannot be moved any more would hold on to the disk. The reserve is for what other programs
write meanwhile.
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
from ssmd.sessions.rows.database import DiskFull
from ssmd.sessions.rows.holding import stored_bytes
from ssmd.sessions.turn import StoreError

FILE = "reserve"
RESERVE_BYTES = 8 << 20
FOR_REMOVAL = 4 << 20  # of it: to remove sessions and let states go, which both write first; the rest is for text
_STEP = 1 << 20  # that is given up at once, as others may take what is free
LOW_BYTES = 256 << 20  # with less the log is kept short, as moving it into the file takes room too
_AMPLE = 4  # times the reserve must be free for one to be made
_MARGIN = 1 << 20  # pages of tables and indices that a commit writes beside its states
Result = TypeVar("Result")


def cut(data_dir: Path, left: int) -> bool:
    """Cut a data directory's reserve down to `left` bytes. Whether that gave any back to the disk."""
    file = data_dir / FILE
    with contextlib.suppress(OSError):
        if file.stat().st_size > left:
            if left:
                os.truncate(file, left)
            else:
                file.unlink()
            return True
    return False


class Room:
    """The room that a database has on its disk. From any thread, and beside other processes."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine, self._database = engine, file
        self._file = file.with_name(FILE)
        self._wanted = False

    def free(self) -> int:
        """Bytes that may still be written; where the system does not say, more than any disk has."""
        try:
            return shutil.disk_usage(self._file.parent).free
        except OSError:
            return 1 << 62

    def holds(self, nbytes: int, quota: int | None) -> bool:
        """Whether a commit with so many bytes of states has room. Raises StoreError."""
        kept = RESERVE_BYTES - self._size() if self._wanted else 0  # was given up, but not for states
        if not nbytes or self.free() - kept >= 2 * nbytes + LOW_BYTES:
            return True
        try:
            log = database.move_log(self._engine, self._database)
        except DiskFull:
            return False
        with database.reading(self._engine, self._database) as connection:
            grows = nbytes - database.free_bytes(connection)
            if quota is not None:  # what goes for it leaves its pages
                grows -= max(0, stored_bytes(connection) + nbytes - quota)
        return self.free() - kept >= max(0, nbytes + _MARGIN - log) + max(0, grows)

    def tidy(self) -> None:
        """Keep the log short while there is little room; to be called after a commit, which is durable."""
        if self.free() < LOW_BYTES:
            with contextlib.suppress(StoreError, OSError):
                database.move_log(self._engine, self._database)

    def for_words(self, work: Callable[[], Result]) -> Result:
        """Do work that needs little room, and give up of the reserve what it takes, but for what removing needs."""
        while True:
            try:
                return work()
            except DiskFull:
                if not self.give_up(max(FOR_REMOVAL, self._size() - _STEP)):
                    raise

    def removing(self, work: Callable[[Connection], Result]) -> Result:
        """Run a write transaction that removes, on a full disk, and give back what it freed. Raises StoreError."""
        self.give_up(0)
        with contextlib.suppress(StoreError):
            database.shorten_log(self._engine, self._database)
        with database.sparing(self._engine, self._database) as connection:
            done = work(connection)
        with contextlib.suppress(DiskFull):  # what was freed is for the next commits then
            database.shrink(self._engine, self._database)
        return done

    def reserve(self) -> bool:
        """Keep a reserve from now on. False if there is no room for one; `restock` tries again."""
        self._wanted = True
        return self.restock()

    def restock(self) -> bool:
        """Make the reserve again that was given up, if one is kept and there is room. Whether there is room."""
        try:
            if self._wanted and self._size() != RESERVE_BYTES:
                if self.free() < _AMPLE * RESERVE_BYTES:
                    return False
                self._make()
        except OSError:
            return False
        return self.free() >= RESERVE_BYTES

    def _make(self) -> None:
        """Random bytes, as a file system may keep zeros in no room at all."""
        made = self._file.with_name(f".{FILE}-{os.getpid()}")
        try:
            with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NOLINK, 0o600), "wb") as f:
                f.write(os.urandom(RESERVE_BYTES))
                f.flush()
                os.fsync(f.fileno())
            made.replace(self._file)
        finally:
            made.unlink(missing_ok=True)

    def give_up(self, left: int) -> bool:
        """Cut the reserve down to `left` bytes. Whether that gave any back to the disk."""
        given = cut(self._file.parent, left)
        self._wanted |= given  # whoever made it: it is made again
        return given

    def _size(self) -> int:
        """Bytes of the reserve as it is now."""
        try:
            return self._file.stat().st_size
        except OSError:
            return 0
