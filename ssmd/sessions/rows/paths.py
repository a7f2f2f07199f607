"""Places on a path: the turns above one are numbered by their depth, and a few are read of a long path.

A turn far from the root keeps the ids of the turns above it whose depth is a multiple of EVERY. So any turn above it is
found in at most EVERY steps, whatever branches there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, select

from ssmd.sessions.rows.replies import read_parts, write_facts
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import as_they_are, read_path_ids
from ssmd.sessions.turn import NewTurn, StoreError, is_unicode

EVERY = 256  # turns
_PART = "path"  # of a turn's facts
_t = turn_table.c
_PLACE = select(_t.id, _t.parent, _t.depth).where(_t.id == bindparam("turn"))


def _climb() -> Any:
    """Build the query of (id, depth) of a turn and of those above it, as far as a depth."""
    at = select(_t.id, _t.parent, _t.depth).where(_t.id == bindparam("turn")).cte("at", recursive=True)
    above = select(_t.id, _t.parent, _t.depth).where(_t.id == at.c.parent, at.c.depth > bindparam("least"))
    at = at.union_all(above)
    return select(at.c.id, at.c.depth).limit(bindparam("most"))


_CLIMB = _climb()


def note(connection: Connection, turn: NewTurn) -> None:
    """Keep the ids of turns far above a new turn with it, if its path is long."""
    if turn.parent is None:
        return
    row = connection.execute(_PLACE, {"turn": turn.id}).one_or_none()
    if row is not None and row.depth >= EVERY:
        marks = _marks(connection, turn.parent, row.depth - 1)
        if row.depth % EVERY == 1:
            marks = [*marks[: row.depth // EVERY], turn.parent]
        write_facts(connection, turn.id, {"above": marks}, _PART)


def _marks(connection: Connection, turn: str, depth: int) -> list[str]:
    """Return the ids at the depths 0, EVERY … above a turn of this depth; of the whole path if it keeps none."""
    kept = read_parts(connection, turn, [_PART]).get(_PART) if depth >= EVERY else None
    if kept is not None:
        return list(kept["above"])
    return read_path_ids(connection, turn)[:depth:EVERY]


class TurnPath:
    """The path from the root to a turn. Its turns are numbered from 0; their ids are read as they are needed."""

    def __init__(self, connection: Connection, turn: str) -> None:
        self._connection = connection
        self._ids: dict[int, str] = {}  # by depth, those that were read
        self._marks: list[str] = []
        self._last = -1  # depth of the turn
        with as_they_are(connection):
            row = connection.execute(_PLACE, {"turn": turn}).one_or_none()
        if row is None:
            return
        if isinstance(row.depth, int) and row.depth >= EVERY:
            self._last, self._ids[row.depth] = row.depth, turn
            self._marks = _marks(connection, turn, row.depth)
        else:
            self._read_all(turn)

    @property
    def size(self) -> int:
        return self._last + 1

    def ids(self, numbers: Sequence[int]) -> list[str]:
        """Return the ids of turns of the path. Their numbers exist. Raises StoreError if the path was altered."""
        for number in numbers:
            if number not in self._ids:
                self._read(number)
        return [self._ids[number] for number in numbers]

    def find(self, turn: str) -> int | None:
        """Return the number of a turn; None if it is not on the path."""
        with as_they_are(self._connection):
            row = self._connection.execute(_PLACE, {"turn": turn}).one_or_none()
        known = row is not None and isinstance(row.depth, int) and 0 <= row.depth < self.size
        return row.depth if row is not None and known and self.ids([row.depth]) == [turn] else None

    def _read(self, number: int) -> None:
        """Read the ids from a number on, up to the next turn that is known. Raises StoreError."""
        above = number // EVERY + 1
        start = self._marks[above] if above < len(self._marks) else self._ids[self._last]
        values = {"turn": start, "least": number // EVERY * EVERY, "most": EVERY + 1}
        with as_they_are(self._connection):
            rows = self._connection.execute(_CLIMB, values).all()
        self._ids |= {row.depth: row.id for row in rows if is_unicode(row.id)}
        if number not in self._ids:  # a repair moved it
            size, last = self.size, self._ids[self._last]
            self._read_all(last)
            if self.size != size:  # other numbers would be those of other turns
                raise StoreError(f"a turn above {last!r} was altered; see `ssmd session check`")

    def _read_all(self, turn: str) -> None:
        self._ids = dict(enumerate(read_path_ids(self._connection, turn)))
        self._last = len(self._ids) - 1
