"""Takes out of a damaged store what is broken, and nothing else. `check` only looks; `repair` acts in one transaction.

A file whose structure is torn is read row by row into a new one, which takes its place; the torn one is kept beside it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, text, update

from ssmd.sessions import database
from ssmd.sessions.check import Damage, Findings, as_they_are, examine, is_moment, is_text, path_to
from ssmd.sessions.holding import batches, count_again
from ssmd.sessions.schema import (
    checkpoint,
    checkpoint_segment,
    metadata,
    segment,
    session,
    total,
    turn,
)
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError
from ssmd.sessions.turns import from_micros

Progress = Callable[[int], None]
_PASSES = 5
_MAX_GAP = 10_000  # ids in a row that cannot be read, until the rest of a table is given up


@dataclass(frozen=True)
class Checked:
    """damages: what was found; once repaired, also what was lost of it. kept: where a torn file was put aside."""

    damages: tuple[Damage, ...]
    sessions: int
    turns: int
    checkpoints: int
    repaired: bool = False
    kept: Path | None = None


def check(data_dir: Path, progress: Progress = lambda _: None, *, busy_ms: int = 2000) -> Checked:
    """Read everything and say what is broken. Changes nothing. Raises StoreError if it cannot even be opened."""
    found: Findings | None = None
    try:
        with contextlib.closing(Store.open(data_dir, busy_ms=busy_ms)) as store, store.reading() as connection:
            found = examine(connection, progress)
    except database.DamagedFile as err:  # maybe only said when the transaction ends
        found = found if found is not None and found.torn else Findings.of_torn_file(str(err.__cause__))
    return Checked(tuple(found.damages), *found.counted)


def repair(data_dir: Path, progress: Progress = lambda _: None, *, busy_ms: int = 2000) -> Checked:
    """Check, and take out what is broken. Nobody else may use the store meanwhile. Raises StoreError."""
    torn: list[Damage] = []
    kept = None
    try:
        damages, counted = _repair_rows(data_dir, progress, busy_ms)
    except database.DamagedFile as err:
        torn = Findings.of_torn_file(str(err.__cause__ or err)).damages
        kept, lost = _salvage(data_dir, busy_ms)
        damages, counted = _repair_rows(data_dir, progress, busy_ms)
        damages = [*torn, *lost, *damages]
    return Checked(tuple(damages), *counted, repaired=bool(damages), kept=kept)


def _repair_rows(data_dir: Path, progress: Progress, busy_ms: int) -> tuple[list[Damage], tuple[int, int, int]]:
    """Raises DamagedFile if rows are not the problem."""
    with contextlib.closing(Store.open(data_dir, busy_ms=busy_ms)) as store:
        with store.writing() as connection:
            found = examine(connection, progress)
            if found.torn:
                raise database.DamagedFile(found.damages[0].problem)
            damages = _mend(connection, found)
        if damages:
            store.collect()  # gives the space back
        return damages, _count(store)


def _count(store: Store) -> tuple[int, int, int]:
    with store.reading() as connection:
        a, b, c = (
            connection.execute(select(func.count()).select_from(t)).scalar_one() for t in (session, turn, checkpoint)
        )
    return a, b, c


def _mend(connection: Connection, found: Findings) -> list[Damage]:
    """What one pass takes out may show more: a turn that shares ids with one that lost them."""
    damages: list[Damage] = []
    for _ in range(_PASSES):
        if not found.damages:
            return damages
        damages += [d for d in found.damages if d not in damages]
        _apply(connection, found)
        found = examine(connection)
    if found.damages:
        raise StoreError(f"the store could not be repaired, and was left as it was: {found.damages[0]}")
    return damages


def _apply(connection: Connection, found: Findings) -> None:
    t = turn.c
    # First every link that leads to a row that goes, so that no cascade has far to go.
    for some in batches(sorted(found.turns)):
        connection.execute(update(turn).where(t.id.in_(some)).values(parent=None))
    for some in batches(sorted(found.turns)):
        connection.execute(delete(turn).where(t.id.in_(some)))
    for numbers in batches(sorted(found.checkpoints)):
        connection.execute(delete(checkpoint).where(checkpoint.c.id.in_(numbers)))
    _drop_what_points_nowhere(connection)
    for numbers in batches(sorted(found.segments)):
        connection.execute(delete(checkpoint_segment).where(checkpoint_segment.c.segment.in_(numbers)))
        connection.execute(delete(segment).where(segment.c.id.in_(numbers)))
    for some in batches(sorted(found.unread)):
        nothing = {"ids_shared": 0, "ids": b"", "text_shared": 0, "text": "", "prompt_tokens": 0}
        connection.execute(update(turn).where(t.id.in_(some)).values(nothing))
        # The rest of its row was not readable either, if that was what was wrong with it.
        for broken, value in ((t.finish, "stop"), (t.complete, True), (t.created_at, 0)):
            wrong = func.typeof(broken) != ("text" if value == "stop" else "integer")
            connection.execute(update(turn).where(t.id.in_(some), wrong).values({broken: value}))
    for name, (depth, length, chain) in found.chains.items():
        values = {"depth": depth, "length": length, "chain": chain}
        connection.execute(update(turn).where(t.id == name).values(values))
    for name in sorted(found.sessions | found.homeless):
        _mend_session(connection, found, name)
    _sweep(connection)


def _drop_what_points_nowhere(connection: Connection) -> None:
    for table in metadata.sorted_tables:
        if table in (turn, checkpoint):  # which are looked at one by one
            continue
        for key in table.foreign_keys:
            connection.execute(delete(table).where(key.parent.not_in(select(key.column))))
    known = select(checkpoint.c.id)
    connection.execute(update(checkpoint).where(checkpoint.c.parent.not_in(known)).values(parent=None))


def _mend_session(connection: Connection, found: Findings, name: str) -> None:
    """From its turns: gone without one, made anew where nothing is known about it."""
    base = connection.execute(text("SELECT base FROM session WHERE id = :id"), {"id": name}).scalar()
    inherited = path_to(base, found.told)
    mine = {n: t for n, t in found.told.items() if t.session == name} | {n: found.told[n] for n in inherited}
    if not mine:
        connection.execute(delete(session).where(session.c.id == name))
        return
    newest = max(mine, key=lambda n: mine[n].seq)
    with as_they_are(connection):
        row = connection.execute(text("SELECT * FROM session WHERE id = :id"), {"id": name}).one_or_none()
        written = connection.scalars(text("SELECT created_at FROM turn WHERE session = :id"), {"id": name}).all()
    times = [n for n in written if isinstance(n, int) and n > 0]
    links = text(
        "SELECT c.lineage FROM checkpoint c JOIN turn_checkpoint l ON l.checkpoint = c.id JOIN turn t ON t.id = l.turn "
        "WHERE t.session = :id LIMIT 1"
    )
    made: dict[str, Any] = {
        "id": name,
        "created_at": min(times, default=0),
        "last_used_at": max(times, default=0),
        "model": "unknown",
        "lineage": connection.execute(links, {"id": name}).scalar() or "",
        "clock": from_micros(min(times, default=0)).isoformat(),
        "title": "",
        "pinned": False,
        "imported": "",
    }
    if row is not None:
        made |= {k: getattr(row, k) for k, v in made.items() if _plausible(k, getattr(row, k), v)}
    head = row.head if row is not None and row.head in mine else newest
    made |= {"base": inherited[0] if inherited else None, "root": inherited[-1] if inherited else None}
    made |= {"head": head, "turns": len(mine), "retained": 0, "own_nbytes": None, "shared_nbytes": None}
    if row is None:
        connection.execute(insert(session).values(made))
    else:
        connection.execute(update(session).where(session.c.id == name).values(made))


def _plausible(column: str, value: object, example: object) -> bool:
    if column == "clock":
        return is_text(value) and is_moment(str(value))
    if column == "pinned":
        return value in (0, 1)
    return is_text(value) if isinstance(example, str) else isinstance(value, int) and value >= 0


def _sweep(connection: Connection) -> None:
    """Checkpoints without turns, rows without checkpoints, and all counts anew."""
    connection.execute(text("DELETE FROM checkpoint WHERE id NOT IN (SELECT checkpoint FROM turn_checkpoint)"))
    connection.execute(text("DELETE FROM segment WHERE id NOT IN (SELECT segment FROM checkpoint_segment)"))
    connection.execute(
        text(
            "UPDATE checkpoint SET recurrent_nbytes = "
            "(SELECT coalesce(sum(length(data)), 0) FROM piece WHERE piece.checkpoint = checkpoint.id)"
        )
    )
    stored = select(func.coalesce(func.sum(checkpoint.c.recurrent_nbytes), 0)).scalar_subquery()
    rows = select(func.coalesce(func.sum(segment.c.nbytes), 0)).scalar_subquery()
    connection.execute(delete(total))
    connection.execute(insert(total).values(name="checkpoints", nbytes=select(stored + rows).scalar_subquery()))
    count_again(connection, list(connection.scalars(select(session.c.id))))


def _salvage(data_dir: Path, busy_ms: int) -> tuple[Path, list[Damage]]:
    """Copy what can be read into a new file, and put the old one aside. (where, tables of which something is lost)"""
    file = data_dir / database.FILE
    fresh = data_dir / "salvage"
    shutil.rmtree(fresh, ignore_errors=True)  # of an attempt that was interrupted
    try:
        Store.open(fresh, busy_ms=busy_ms).close()
        lost = _copy_all(file, fresh / database.FILE)
        kept = next(p for n in range(1, 1000) if not (p := data_dir / f"{database.FILE}.damaged-{n}").exists())
        for side in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{file}{side}", f"{kept}{side}")
        os.rename(fresh / database.FILE, file)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return kept, lost


def _copy_all(file: Path, new_file: Path) -> list[Damage]:
    lost: list[Damage] = []
    try:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as old:
            old.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            with contextlib.closing(sqlite3.connect(new_file, isolation_level=None)) as new:
                new.execute("BEGIN")
                for name in (t.name for t in metadata.sorted_tables if t is not total):
                    copied, complete = _copy(old, new, name)
                    if not complete:
                        lost.append(Damage(f"the table {name}", "not all of it can be read", f"{copied} rows are kept"))
                new.execute("COMMIT")
                new.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as err:  # SQLite's message may quote what is damaged
        advice = "move it away to start with an empty one"
        raise StoreError(f"{file} is damaged beyond repair ({err}); {advice}") from err
    return lost


def _copy(old: sqlite3.Connection, new: sqlite3.Connection, name: str) -> tuple[int, bool]:
    """(rows copied, whether those were all)"""
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
    """Rows in the order of their ids; None for each gap that cannot be read."""
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
    """From both ends, as far as that goes."""
    for order in ("", " DESC"):
        keys = ", ".join(f"{c}{order}" for c in columns)
        try:
            query = f"SELECT {', '.join(columns)} FROM {name} ORDER BY {keys}"  # noqa: S608 - names of our own tables
            yield from old.execute(query)
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            yield None
        else:
            return
