"""A backup: the session store at one moment, copied row by row into a new file while others go on writing.

A copy of the files would contain removed rows that still wait in the log to be erased. SQLite's backup interface copies
whole pages with their unused middle, where copies of removed rows can lie (rows/erasure.py). A copy of rows contains
nothing that was removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ssmd.machine import folder
from ssmd.machine.lockfile import lock
from ssmd.machine.privatefile import NOLINK
from ssmd.machine.progress import show_progress, tell
from ssmd.machine.size import show_size
from ssmd.sessions.fsck.findings import Damage
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows import database
from ssmd.sessions.rows.database import place
from ssmd.sessions.rows.faults import DiskFull, errors
from ssmd.sessions.rows.retention import NOTHING
from ssmd.sessions.rows.schema import metadata
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

UNFINISHED = "incomplete"  # the folder in the target until all is copied and checked
_LOCK = ".lock"  # in that folder
_AT_ONCE_BYTES = 16 << 20  # bytes of states between two progress reports
_AT_ONCE_TURNS = 500
_LEAST_BYTES = 2 << 20  # size of a nearly empty file, and of SQLite's own data beside rows
# Tables of what a machine knows of its remote: what it shares, what stays, what waits, and which machines it trusts.
_OF_REMOTES = ("outbox", "remote_session", "remote_mark", "buried_turn", "trusted_machine")
# States that no turn links to belong to no conversation, and are gone in minutes. They come from `store: false` and
# from answers that are still generated. A backup must not keep them.
_KEPT = "SELECT checkpoint FROM live.turn_checkpoint"
_LISTED = f"SELECT segment FROM live.checkpoint_segment WHERE checkpoint IN ({_KEPT})"  # noqa: S608 - our own words


@dataclass(frozen=True)
class Backup:
    """A finished backup. damages: of the copy, which was read again as a whole."""

    file: Path
    nbytes: int
    states: bool
    sessions: int
    turns: int
    checkpoints: int
    damages: tuple[Damage, ...]


def back_up(data_dir: Path, target: Path, *, states: bool = True, busy_ms: int = 2000) -> Backup:
    """Copy the store of `data_dir` into an empty folder, and read the copy again.

    It contains all commits made before it begins. states: copy the checkpoints too, so that conversations continue
    without being read again. Raises StoreError; `target` is then empty.
    """
    if not (data_dir / database.FILE).exists():
        raise StoreError(f"there are no sessions in {data_dir}: nothing to back up")
    target = _emptied(data_dir, target)
    unfinished = target / UNFINISHED
    with _held(unfinished):
        with closing(Store.open(unfinished)) as empty:
            alone = empty.alone
        copy = unfinished / database.FILE
        _check_private(target, copy)
        with closing(Store.open(data_dir, busy_ms=busy_ms)) as store, _explained(target, store.file):
            counted = _copy(place(store.file, store.alone), place(copy, alone), copy, states)
        with show_progress("checking the copy"):
            found = check(unfinished)
        if not found.damages and (found.sessions, found.turns, found.checkpoints) != counted:
            raise StoreError(f"the copy in {target} holds other rows than were copied; is its disk sound?")
        file = target / database.FILE
        _flush(copy)
        copy.rename(file)
    _flush(target)
    return Backup(file, file.stat().st_size, states, *counted, found.damages)


def _emptied(data_dir: Path, target: Path) -> Path:
    """Return the absolute path of a folder that is empty and belongs to this user alone. Raises StoreError."""
    try:
        target = folder.absolute(target)
        real, home = target.resolve(), data_dir.resolve()
        if real == home or home in real.parents:
            raise StoreError(f"{target} is in the data directory {data_dir}, and would be lost with it; choose another")
        there = next((one for one in target.iterdir() if one.name != UNFINISHED), None) if target.exists() else None
        if there is not None:
            raise StoreError(f"{target} is not empty ({there.name} is there); a backup takes a folder of its own")
        folder.own(target, "the backup's folder", "choose another")
    except ValueError as err:
        raise StoreError(str(err)) from err
    except OSError as err:
        raise StoreError(f"{target} cannot be used for a backup: {err.strerror or err}; choose another") from err
    return target


def _check_private(target: Path, copy: Path) -> None:
    """Raise StoreError if the file system keeps no permissions, as on USB sticks."""
    if folder.others_open(target) or (os.name == "posix" and copy.stat().st_mode & 0o077):
        raise StoreError(
            f"the file system of {target} does not keep permissions, so other users could read the conversations; "
            "choose a folder on another one"
        )


@contextlib.contextmanager
def _held(unfinished: Path) -> Iterator[None]:
    """Make the folder of a copy, and remove it afterwards. One that a killed backup left is emptied first."""
    with contextlib.ExitStack() as held:
        try:
            folder.make_private(unfinished)
            descriptor = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | NOLINK, 0o600)
            held.callback(os.close, descriptor)
            if not lock(descriptor):
                advice = "wait for it, or choose another folder"
                raise StoreError(f"another `ssmd backup` writes to {unfinished.parent}; {advice}")
            for left in unfinished.iterdir():
                if left.name != _LOCK:
                    left.unlink()
        except OSError as err:
            raise StoreError(f"{unfinished} cannot be used for a backup: {err.strerror or err}; remove it") from err
        try:
            yield
        finally:
            if sys.platform == "win32":  # it removes no open file
                held.close()
            shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _explained(target: Path, file: Path) -> Iterator[None]:
    """Turn SQLite's errors into StoreErrors: only the copy needs room, only the store can be damaged."""
    try:
        with errors(file):
            yield
    except DiskFull as err:
        raise StoreError(_no_room(target)) from err


def _no_room(target: Path, needed: int = 0) -> str:
    free = shutil.disk_usage(target).free
    wanted = f"{show_size(needed)} are needed" if needed else "that was not enough"
    return f"no room for a backup in {target}: {show_size(free)} are free, {wanted}; nothing was left there"


def _copy(live: str, to: str, copy: Path, states: bool) -> tuple[int, int, int]:
    """Copy the rows in one read transaction; return the numbers of (sessions, turns, checkpoints).

    live, to: the addresses at which SQLite opens the store and the copy.
    """
    with closing(sqlite3.connect(to, uri=True, isolation_level=None)) as connection:
        # An unfinished copy is worthless, so it needs no journal and no wait for the disk.
        for setting in ("main.journal_mode=OFF", "main.synchronous=OFF", "main.secure_delete=ON", "foreign_keys=OFF"):
            connection.execute(f"PRAGMA {setting}").fetchall()
        for setting in ("trusted_schema=OFF", "cell_size_check=ON"):
            connection.execute(f"PRAGMA {setting}")
        connection.execute("ATTACH ? AS live", (live,))
        connection.execute("BEGIN")
        _check_room(connection, copy, states)
        _copy_text(connection, states)
        if states:
            _copy_states(connection)
        nbytes = "SELECT coalesce(sum(nbytes), 0) FROM"
        recurrent = "SELECT coalesce(sum(recurrent_nbytes), 0) FROM checkpoint"
        connection.execute("DELETE FROM total")
        connection.execute(
            f"INSERT INTO total SELECT 'checkpoints', ({recurrent}) + ({nbytes} segment) "
            f"UNION ALL SELECT 'turns', ({nbytes} turn)"
        )
        counts = [connection.execute(f"SELECT count(*) FROM {t}") for t in ("session", "turn", "checkpoint")]  # noqa: S608 - as above
        sessions, turns, checkpoints = (one.fetchone()[0] for one in counts)
        connection.execute("COMMIT")
    return sessions, turns, checkpoints


def _check_room(connection: sqlite3.Connection, copy: Path, states: bool) -> None:
    query = "SELECT coalesce(sum(nbytes), 0) FROM live.turn"
    (text,) = connection.execute(query).fetchone()
    needed = _LEAST_BYTES + text * 3 // 2
    if states:
        (nbytes,) = connection.execute("SELECT nbytes FROM live.total WHERE name = 'checkpoints'").fetchone()
        needed += nbytes + nbytes // 50
    if shutil.disk_usage(copy.parent).free < needed:
        raise StoreError(_no_room(copy.parent.parent, needed))


def _copy_text(connection: sqlite3.Connection, states: bool) -> None:
    (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM live.turn").fetchone()
    with show_progress("copying conversations"):
        _insert(connection, "session", "")
        for at in range(0, last, _AT_ONCE_TURNS):
            _insert(connection, "turn", "WHERE seq > ? AND seq <= ?", [(at, at + _AT_ONCE_TURNS)])
            tell(min(at + _AT_ONCE_TURNS, last), last)
        _insert(connection, "reply", "")
        for table in _OF_REMOTES:
            _insert(connection, table, "")
    if not states:
        connection.execute("UPDATE session SET own_nbytes = 0, shared_nbytes = 0, retained = ?", (NOTHING,))


def _copy_states(connection: sqlite3.Connection) -> None:
    _insert(connection, "layout", "")
    _insert(connection, "checkpoint", f"WHERE id IN ({_KEPT})")
    connection.execute("UPDATE checkpoint SET parent = NULL WHERE parent NOT IN (SELECT id FROM checkpoint)")
    _insert(connection, "turn_checkpoint", "")
    _insert(connection, "checkpoint_segment", f"WHERE checkpoint IN ({_KEPT})")
    pieces = connection.execute(
        f"SELECT checkpoint, first, length(data) FROM live.piece WHERE checkpoint IN ({_KEPT}) ORDER BY rowid"  # noqa: S608 - our own words
    ).fetchall()
    segments = connection.execute(
        f"SELECT id, length(data) FROM live.segment WHERE id IN ({_LISTED}) ORDER BY id"  # noqa: S608 - as above
    ).fetchall()
    done, of = 0, sum(row[-1] for row in (*pieces, *segments))
    with show_progress("copying states"):
        for table, rows, where in (
            ("piece", pieces, "WHERE checkpoint = ? AND first = ?"),
            ("segment", segments, "WHERE id = ?"),
        ):
            for some in _portions(rows):
                _insert(connection, table, where, [row[:-1] for row in some])
                done += sum(row[-1] for row in some)
                tell(done, of)


def _portions(rows: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
    """Cut rows, whose last value is their size in bytes, into portions of some _AT_ONCE_BYTES."""
    first = nbytes = 0
    for at, row in enumerate(rows, 1):
        nbytes += row[-1]
        if nbytes >= _AT_ONCE_BYTES or at == len(rows):
            yield rows[first:at]
            first, nbytes = at, 0


def _insert(connection: sqlite3.Connection, table: str, where: str, values: Sequence[tuple[int, ...]] = ((),)) -> None:
    columns = ", ".join(column.name for column in metadata.tables[table].columns)
    connection.executemany(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM live.{table} {where}", values)  # noqa: S608 - names of our own


def _flush(path: Path) -> None:
    """Flush a file, or the names in a folder if the system supports that, to the disk."""
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
