"""Findings of a check, and raw reads of rows: without the schema's types, because any byte may have changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, literal_column, select, text
from sqlalchemy.sql.expression import TableClause, table

from ssmd.sessions.line import Line, Passage
from ssmd.sessions.match import Chain
from ssmd.sessions.rows import turns
from ssmd.text.messages import Message

AT_ONCE = 8  # rows that may hold 8 MiB each


@dataclass(frozen=True)
class Damage:
    """A damaged row or file. problem: what is wrong with it. loss: the effect of a repair."""

    what: str
    problem: str
    loss: str

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}; {self.loss}"


@dataclass(frozen=True)
class ReadableTurn:
    """A turn that can be read."""

    parent: str | None
    session: str
    seq: int
    depth: int
    length: int  # of the conversation down to its answer, in messages
    chain: Chain
    said: tuple[Message, ...]  # its messages
    stem: str | None
    ids: Line  # its own; empty if they cannot be read
    text: Passage  # its own; empty if it cannot be read
    created_at: int  # 0 if it cannot be read
    lineage: str


@dataclass(frozen=True)
class Home:
    """The facts of a session that its turns reveal. base, root: of a fork; turns: its own and inherited ones."""

    base: str | None
    root: str | None
    turns: frozenset[str]


@dataclass
class Findings:
    """The damages that were found, and the work for a repair."""

    damages: list[Damage] = field(default_factory=list)
    torn: bool = False  # the file's own structure is damaged
    checkpoints: set[int] = field(default_factory=set)  # ids to remove
    segments: set[int] = field(default_factory=set)  # ids to remove
    replies: set[int] = field(default_factory=set)  # ids to remove
    turns: set[int] = field(default_factory=set)  # `seq` to remove
    broken: dict[str, str | None] = field(default_factory=dict)  # ids of turns to remove, each with its parent
    told: dict[str, ReadableTurn] = field(default_factory=dict)  # the other turns, parents first
    unread: set[str] = field(default_factory=set)  # of these: turns that lose ids and text, and keep their messages
    reworded: set[str] = field(default_factory=set)  # of these: turns whose hashes are computed again
    sessions: set[int] = field(default_factory=set)  # `rowid` to remove
    homes: dict[str, Home] = field(default_factory=dict)  # sessions whose row is to be corrected or made again
    owners: dict[str, str] = field(default_factory=dict)  # turns that another session gets, and that session
    counted: tuple[int, int, int] = (0, 0, 0)  # sessions, turns, checkpoints

    @staticmethod
    def of_torn_file(problem: str) -> Findings:
        found = Findings(torn=True)
        found.add("the database file", f"its structure is damaged ({problem})", "what can be read is kept")
        return found

    def add(self, what: str, problem: str, loss: str) -> None:
        self.damages.append(Damage(what, problem, loss))


def raw_columns(name: str, columns: str) -> Any:
    """Select columns of a table without their types."""
    source: TableClause = table(name)
    return select(*(literal_column(f"{name}.{c}").label(c) for c in columns.split())).select_from(source)


def raw_rows(connection: Connection, name: str, columns: str, order: str) -> Iterator[Any]:
    query = raw_columns(name, columns).order_by(text(order))
    return iter(connection.execute(query.execution_options(yield_per=AT_ONCE)))


def is_count(*values: object) -> bool:
    return all(isinstance(v, int) and v >= 0 for v in values)


def is_time(*values: object) -> bool:
    """Return True if all values are times: microseconds since 1970, before the year 9999."""
    return all(turns.is_moment(v) for v in values)


def is_text(*values: object) -> bool:
    try:
        return all(isinstance(v, str) and v.encode() is not None for v in values)
    except UnicodeEncodeError:
        return False


def is_moment(value: object) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False
