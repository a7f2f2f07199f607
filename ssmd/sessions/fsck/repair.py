"""Repair of a damaged store: removes broken rows, and nothing else. `check` only reads; `repair` is one transaction.

A file whose structure is torn is read row by row into a new file, which replaces it. The torn file is kept beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, func, insert, literal_column, select, text, update

from ssmd.sessions.fsck.check import examine
from ssmd.sessions.fsck.findings import Damage, Findings, Home, is_moment, is_text, is_time
from ssmd.sessions.fsck.salvage import remove_unfinished, salvage
from ssmd.sessions.rows import erasure
from ssmd.sessions.rows import turns as turn_rows
from ssmd.sessions.rows.faults import DamagedFile
from ssmd.sessions.rows.holding import batches, count_all_again
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, metadata, reply, segment, session, turn
from ssmd.sessions.rows.turns import as_text, as_they_are, from_micros
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

Progress = Callable[[int], None]
_PASSES = 5


@dataclass(frozen=True)
class CheckReport:
    """The result of a check. damages: after a repair also its losses. kept: the torn file that was put aside."""

    damages: tuple[Damage, ...]
    sessions: int
    turns: int
    checkpoints: int
    repaired: bool = False
    kept: Path | None = None


def check(data_dir: Path, progress: Progress = lambda _: None, *, busy_ms: int = 2000) -> CheckReport:
    """Read everything and report the damages. Changes nothing. Raises StoreError if the store cannot be opened."""
    found: Findings | None = None
    try:
        with contextlib.closing(Store.open(data_dir, busy_ms=busy_ms)) as store, store.reading() as connection:
            found = examine(connection, progress)
    except DamagedFile as err:  # perhaps raised only as the transaction ends
        found = found if found is not None and found.torn else Findings.of_torn_file(str(err.__cause__))
    return CheckReport(tuple(found.damages), *found.counted)


def repair(data_dir: Path, progress: Progress = lambda _: None, *, busy_ms: int = 2000) -> CheckReport:
    """Check the store, and remove what is broken. No other process may use it meanwhile. Raises StoreError."""
    torn: list[Damage] = []
    kept = None
    remove_unfinished(data_dir)
    try:
        damages, counted = _repair_rows(data_dir, progress, busy_ms)
    except DamagedFile as err:
        torn = Findings.of_torn_file(str(err.__cause__ or err)).damages
        kept, lost = salvage(data_dir, busy_ms)
        damages, counted = _repair_rows(data_dir, progress, busy_ms)
        damages = [*torn, *lost, *damages]
    return CheckReport(tuple(damages), *counted, repaired=bool(damages), kept=kept)


def _repair_rows(data_dir: Path, progress: Progress, busy_ms: int) -> tuple[list[Damage], tuple[int, int, int]]:
    """Repair the rows. Raises DamagedFile if the file's structure is the problem."""
    with contextlib.closing(Store.open(data_dir, busy_ms=busy_ms)) as store:
        with store.writing() as connection:
            found = examine(connection, progress)
            if found.torn:
                raise DamagedFile(found.damages[0].problem)
            damages = _mend(connection, found)
        if damages:
            store.collect()  # gives the space back
            store.settle()  # erases removed text for good
        return damages, _count(store)


def _count(store: Store) -> tuple[int, int, int]:
    with store.reading() as connection:
        a, b, c = (
            connection.execute(select(func.count()).select_from(t)).scalar_one() for t in (session, turn, checkpoint)
        )
    return a, b, c


def _mend(connection: Connection, found: Findings) -> list[Damage]:
    """Apply and check until nothing is found. A pass may reveal more: turns that share ids with one that lost them."""
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
    for name, home in sorted(found.homes.items()):
        _mend_session(connection, found, name, home)
    for name, owner in found.owners.items():
        whose = select(session.c.owner).where(session.c.id == owner).scalar_subquery()
        connection.execute(update(turn).where(t.id == name).values(session=owner, owner=func.coalesce(whose, "")))
    for numbers in batches(sorted(found.replies)):
        connection.execute(delete(reply).where(reply.c.id.in_(numbers)))
    # First the links to rows that are removed, so that no cascade has far to go.
    for numbers in batches(sorted(found.turns)):
        connection.execute(update(turn).where(t.seq.in_(numbers)).values(parent=None))
    for numbers in batches(sorted(found.turns)):
        connection.execute(delete(turn).where(t.seq.in_(numbers)))
    for numbers in batches(sorted(found.sessions)):
        connection.execute(delete(session).where(literal_column("rowid").in_(numbers)))
    for numbers in batches(sorted(found.checkpoints)):
        connection.execute(delete(checkpoint).where(checkpoint.c.id.in_(numbers)))
    _drop_what_points_nowhere(connection)
    for numbers in batches(sorted(found.segments)):
        connection.execute(delete(checkpoint_segment).where(checkpoint_segment.c.segment.in_(numbers)))
        connection.execute(delete(segment).where(segment.c.id.in_(numbers)))
    for name in [n for n in found.told if n in found.unread or n in found.reworded]:
        turn_rows.restate(connection, name, found.told[name].said, keep=name not in found.unread)
    _sweep(connection)
    erasure.owe(connection)


def _drop_what_points_nowhere(connection: Connection) -> None:
    for table in metadata.sorted_tables:
        if table in (turn, checkpoint):  # each row of these was checked
            continue
        for key in table.foreign_keys:
            connection.execute(delete(table).where(key.parent.not_in(select(key.column))))
    known = select(checkpoint.c.id)
    connection.execute(update(checkpoint).where(checkpoint.c.parent.not_in(known)).values(parent=None))


def _mend_session(connection: Connection, found: Findings, name: str, home: Home) -> None:
    """Correct a session's row. If the row is missing, make it again from the session's turns."""
    newest = max(home.turns, key=lambda n: found.told[n].seq)
    with as_they_are(connection):
        row = connection.execute(text("SELECT * FROM session WHERE id = :id"), {"id": name}).one_or_none()
        owner = connection.execute(select(turn.c.owner).where(turn.c.id == newest)).scalar_one()
    times = [found.told[n].created_at for n in home.turns]
    made: dict[str, Any] = {
        "id": name,
        "created_at": min(filter(None, times), default=0),
        "last_used_at": max(times),
        "model": "unknown",
        "lineage": found.told[newest].lineage,
        "clock": from_micros(min(filter(None, times), default=0)).isoformat(),
        "title": "",
        "pinned": False,
        "imported": "",
        "owner": as_text(owner),
    }
    if row is not None:
        made |= {k: getattr(row, k) for k, v in made.items() if _plausible(k, getattr(row, k), v)}
    head = row.head if row is not None and row.head in home.turns else newest
    made |= {"head": head, "turns": len(home.turns), "base": home.base, "root": home.root}
    made["retained"] = 0
    if row is None:
        connection.execute(insert(session).values(made))
    else:
        connection.execute(update(session).where(session.c.id == name).values(made))


def _plausible(column: str, value: object, example: object) -> bool:
    if column == "clock":
        return is_moment(value)
    if column == "pinned":
        return value in (0, 1)
    return is_text(value) if isinstance(example, str) else is_time(value)


def _sweep(connection: Connection) -> None:
    """Remove checkpoints without turns and rows without checkpoints, and count everything again."""
    connection.execute(text("DELETE FROM checkpoint WHERE id NOT IN (SELECT checkpoint FROM turn_checkpoint)"))
    connection.execute(text("DELETE FROM segment WHERE id NOT IN (SELECT segment FROM checkpoint_segment)"))
    connection.execute(
        text(
            "UPDATE checkpoint SET recurrent_nbytes = "
            "(SELECT coalesce(sum(length(data)), 0) FROM piece WHERE piece.checkpoint = checkpoint.id)"
        )
    )
    count_all_again(connection)
