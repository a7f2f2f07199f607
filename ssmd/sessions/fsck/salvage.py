"""Salvage of a database file whose structure is torn: readable rows are copied one by one into a new file."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssmd.sessions.fsck.findings import Damage
from ssmd.sessions.rows import database
from ssmd.sessions.rows.schema import metadata
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

_TABLES = tuple(t.name for t in metadata.sorted_tables)
_FRESH = "salvage"  # folder of the new file until it is whole
_MAX_GAP = 10_000  # unreadable ids in a row after which the rest of a table is given up


def salvage(data_dir: Path, busy_ms: int) -> tuple[Path, list[Damage]]:
    """Copy readable rows into a new file, and put the old one aside. Returns (its place, tables that lost rows)."""
    file = data_dir / database.FILE
    fresh = data_dir / _FRESH
    try:
        with contextlib.closing(Store.open(fresh, busy_ms=busy_ms)) as empty:
            alone = empty.alone
        lost = _copy_all(file, fresh / database.FILE, alone)
        kept = next(p for n in range(1, 1000) if not (p := data_dir / f"{database.FILE}.damaged-{n}").exists())
        _put_aside(file, kept)
        os.replace(fresh / database.FILE, file)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return kept, lost


def remove_unfinished(data_dir: Path) -> None:
    """Remove what a salvage left that was killed."""
    shutil.rmtree(data_dir / _FRESH, ignore_errors=True)


def _put_aside(file: Path, kept: Path) -> None:
    """Give the file a second name. It never has none: else the next start would make an empty one."""
    with contextlib.suppress(OSError):  # a file system without hard links
        os.link(file, kept)
    for side in ("-wal", "-shm"):  # the new file must not find them
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{file}{side}", f"{kept}{side}")
    if not kept.exists():
        os.rename(file, kept)


def _copy_all(file: Path, new_file: Path, alone: bool) -> list[Damage]:
    """Copy what can be read. alone: the file system has no memory that processes share. Raises StoreError."""
    lost: list[Damage] = []
    try:
        with contextlib.closing(_connected(file, alone)) as old:
            old.execute("PRAGMA writable_schema=ON")  # else SQLite reads nothing of a file that was shortened
            old.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            with contextlib.closing(_connected(new_file, alone)) as new:
                new.execute("BEGIN")
                new.execute("DELETE FROM total")  # the one row of an empty file
                found = 0
                for name in _TABLES:
                    copied, complete = _copy(old, new, name)
                    found += copied
                    if not complete:
                        lost.append(Damage(f"the table {name}", "not all of it can be read", f"{copied} rows are kept"))
                if not found:
                    raise sqlite3.DatabaseError("no row of it can be read")
                new.execute("COMMIT")
                new.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as err:  # SQLite's message may quote damaged bytes
        advice = "move it away to start with an empty one"
        raise StoreError(f"{file} is damaged beyond repair ({err}); {advice}") from err
    return lost


def _connected(file: Path, alone: bool) -> sqlite3.Connection:
    return sqlite3.connect(database.place(file, alone), uri=alone, isolation_level=None)


def _copy(old: sqlite3.Connection, new: sqlite3.Connection, name: str) -> tuple[int, bool]:
    """Copy the rows of a table. Returns (rows copied, True if those were all)."""
    there = {row[1] for row in old.execute(f"PRAGMA table_info({name})")}
    columns = [c.name for c in metadata.tables[name].columns if c.name in there]
    if not columns:
        return 0, False
    insert_ = f"INSERT OR IGNORE INTO {name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608 - names of our own tables
    keyless = metadata.tables[name].dialect_options["sqlite"]["with_rowid"] is False
    copied, complete = 0, True
    for row in (_by_key if keyless else _by_rowid)(old, name, columns):
        if row is None:
            complete = False
            continue
        try:
            copied += new.execute(insert_, row).rowcount
        except (sqlite3.Error, UnicodeEncodeError):
            complete = False
    return copied, complete


def _by_rowid(old: sqlite3.Connection, name: str, columns: list[str]) -> Iterator[tuple[Any, ...] | None]:
    """Yield rows in the order of their ids, and None for each unreadable gap."""
    query = f"SELECT rowid, {', '.join(columns)} FROM {name} WHERE rowid >= ? ORDER BY rowid LIMIT 1"  # noqa: S608 - names of our own tables
    at, gap = 1, 0
    while gap < _MAX_GAP:
        try:
            row = old.execute(query, (at,)).fetchone()
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            if not gap:
                yield None
            at, gap = at + 1, gap + 1
            continue
        if row is None:
            return
        at, gap = row[0] + 1, 0
        yield row[1:]


def _by_key(old: sqlite3.Connection, name: str, columns: list[str]) -> Iterator[tuple[Any, ...] | None]:
    """Read the rows by key from both ends, as far as that goes."""
    for order in ("", " DESC"):
        keys = ", ".join(f"{c}{order}" for c in columns)
        try:
            query = f"SELECT {', '.join(columns)} FROM {name} ORDER BY {keys}"  # noqa: S608 - names of our own tables
            yield from old.execute(query)
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            yield None
        else:
            return
