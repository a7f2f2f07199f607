"""What a check found, and how it reads rows: as they lie there, without the schema's types, as any byte may have
changed."""

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
    """A row or a file that is damaged. problem: what is wrong with it. loss: what a repair takes away, or does."""

    what: str
    problem: str
    loss: str

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}; {self.loss}"


@dataclass(frozen=True)
class Told:
    """A turn that can be read. said: its messages; length: of the conversation down to its answer; ids, text: its own,
    if they can be; created_at: or 0.
    """

    parent: str | None
    session: str
    seq: int
    depth: int
    length: int
    chain: Chain
    said: tuple[Message, ...]
    stem: str | None
    ids: Line
    text: Passage
    created_at: int
    lineage: str


@dataclass(frozen=True)
class Home:
    """What is known of a session without its row. base, root: of a fork; turns: those that it has, inherited too."""

    base: str | None
    root: str | None
    turns: frozenset[str]


@dataclass
class Findings:
    """What a repair has to do, beside the list of damages.

    torn: the file's own structure is damaged. checkpoints, segments, replies: ids of those that go. turns: `seq` of
    those that go, sessions: `rowid`. broken: the names of turns that go, each with the one above it. told: the others,
    parents first. unread: those of them that lose ids and text, and keep their messages. reworded: those whose hashes
    are made anew. homes: sessions whose row is to be set right, or made anew. owners: turns that get another owner.
    """

    damages: list[Damage] = field(default_factory=list)
    torn: bool = False
    checkpoints: set[int] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)
    replies: set[int] = field(default_factory=set)
    turns: set[int] = field(default_factory=set)
    broken: dict[str, str | None] = field(default_factory=dict)
    told: dict[str, Told] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    reworded: set[str] = field(default_factory=set)
    sessions: set[int] = field(default_factory=set)
    homes: dict[str, Home] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
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
    """Whether all values are times: microseconds since 1970, before the year 9999."""
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
