"""Whether everything that is stored is what was written: `examine` finds what is not, repair.py acts on it.

Values are read as they lie there, without the schema's types: any byte may have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import Connection, literal_column, select, text
from sqlalchemy.sql.expression import TableClause, table

from ssmd.sessions.blobs import MAX_BLOB_BYTES, dtype_of, recurrent_values
from ssmd.sessions.checkpoint import Digested, anchor, as_ids, digest, prefix_keys
from ssmd.sessions.holding import stored_bytes
from ssmd.sessions.match import Chain
from ssmd.sessions.schema import metadata
from ssmd.state import StateSpec
from ssmd.text.messages import Message

_AT_ONCE = 8  # rows that may hold 8 MiB each


@dataclass(frozen=True)
class Damage:
    """what: a row or the file. problem: what is wrong with it. loss: what a repair takes away, or does."""

    what: str
    problem: str
    loss: str

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}; {self.loss}"


@dataclass(frozen=True)
class Told:
    """A turn that can be read. length: messages down to its answer; ids, text: how many it has."""

    parent: str | None
    session: str
    seq: int
    depth: int
    length: int
    chain: Chain
    ids: int
    text: int


@dataclass
class Findings:
    """What a repair has to do, beside the list of damages.

    torn: the file's own structure is damaged. checkpoints, segments: ids of those that go. turns: those that go.
    unread: those that lose ids and text, and keep their messages. chains: (depth, length, chain) to be set. heads,
    homeless: sessions whose head, or whose row, is to be made anew.
    """

    damages: list[Damage] = field(default_factory=list)
    torn: bool = False
    checkpoints: set[int] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)
    links: bool = False
    turns: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    chains: dict[str, tuple[int, int, bytes]] = field(default_factory=dict)
    told: dict[str, Told] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    homeless: set[str] = field(default_factory=set)
    counted: tuple[int, int, int] = (0, 0, 0)  # sessions, turns, checkpoints

    @staticmethod
    def of_torn_file(problem: str) -> Findings:
        found = Findings(torn=True)
        found.add("the database file", f"its structure is damaged ({problem})", "what can be read is kept")
        return found

    def add(self, what: str, problem: str, loss: str) -> None:
        self.damages.append(Damage(what, problem, loss))


def examine(connection: Connection, progress: Callable[[int], None] = lambda _: None) -> Findings:
    """Read everything, within one transaction. progress: told of bytes that were read."""
    found = Findings()
    with as_they_are(connection):
        _structure(connection, found)
        if not found.torn:
            segments = _segments(connection, found, progress)
            _checkpoints(connection, found, segments, progress)
            _turns(connection, found)
            _turn_ids(connection, found)
            _sessions(connection, found)
            _links(connection, found)
            _total(connection, found)
    return found


@contextmanager
def as_they_are(connection: Connection) -> Iterator[None]:
    """Text that is no UTF-8 is read all the same, and then seen to be broken."""
    raw: Any = connection.connection.dbapi_connection
    raw.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    try:
        yield
    finally:
        raw.text_factory = str


def _structure(connection: Connection, found: Findings) -> None:
    messages = [str(m) for m in connection.scalars(text("PRAGMA integrity_check(20)"))]
    for name, made in metadata.tables.items():
        there = {row[1] for row in connection.execute(text(f"PRAGMA table_info({name})"))}
        if missing := {c.name for c in made.columns} - there:
            messages = [m for m in messages if m != "ok"]
            messages.append(f"the table {name} has no {', '.join(sorted(missing))}")
    if messages != ["ok"]:
        found.torn = True
        found.damages = Findings.of_torn_file("; ".join(m.replace("\n", ", ") for m in messages[:3])).damages


def _raw(name: str, columns: str) -> Any:
    source: TableClause = table(name)
    names = columns.split()
    return select(*(literal_column(f"{name}.{c}").label(c) for c in names)).select_from(source)


def _rows(connection: Connection, name: str, columns: str, order: str) -> Iterator[Any]:
    query = _raw(name, columns).order_by(text(order))
    return iter(connection.execute(query.execution_options(yield_per=_AT_ONCE)))


def _is_int(*values: object) -> bool:
    return all(isinstance(v, int) and v >= 0 for v in values)


def is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _blob_problem(row: Any) -> str:
    """Of a piece or a segment."""
    if not isinstance(row.data, bytes) or not isinstance(row.dtype, str) or len(row.data) > MAX_BLOB_BYTES:
        return "its numbers are not what was written"
    if hashlib.sha256(row.data).digest() != row.sha256:
        return "its numbers were altered (sha256 differs)"
    if not _is_int(row.first, row.last) or row.first >= row.last or dtype_of(row.dtype) is None:
        return "where its numbers belong is not readable"
    return ""


def _segments(
    connection: Connection, found: Findings, progress: Callable[[int], None]
) -> dict[int, tuple[Digested, str]]:
    """By id, of the sound ones: what goes into a digest."""
    sound: dict[int, tuple[Digested, str]] = {}
    for row in _rows(connection, "segment", "id first last dtype nbytes sha256 data", "id"):
        progress(len(row.data) if isinstance(row.data, bytes) else 0)
        problem = _blob_problem(row)
        if not problem and row.nbytes != len(row.data):
            problem = f"it has {len(row.data)} bytes, not {row.nbytes}"
        if problem:
            found.segments.add(row.id)
            found.add(f"KV rows {row.id}", problem, "the states that stand on them go, their turns are read again")
        else:
            sound[row.id] = ((row.first, row.last, row.sha256), row.dtype)
    return sound


def _checkpoints(
    connection: Connection, found: Findings, segments: dict[int, tuple[Digested, str]], progress: Callable[[int], None]
) -> None:
    specs: dict[str, StateSpec] = {}
    for row in _rows(connection, "layout", "digest tensors", "digest"):
        try:
            spec = StateSpec.from_json(json.loads(row.tensors))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if spec.digest() == row.digest:
            specs[row.digest] = spec
    lists: dict[int, list[int]] = {}
    for row in _rows(connection, "checkpoint_segment", "checkpoint segment", "checkpoint, segment"):
        lists.setdefault(row.checkpoint, []).append(row.segment)
    pieces: dict[int, list[Any]] = {}
    for row in _rows(connection, "piece", "checkpoint first last dtype sha256 data", "checkpoint, first"):
        progress(len(row.data) if isinstance(row.data, bytes) else 0)
        known = None if _blob_problem(row) else (row.first, row.last, row.sha256, len(row.data))
        pieces.setdefault(row.checkpoint, []).append(known or _blob_problem(row))
    columns = "id key anchor layout lineage position digest recurrent_nbytes ids"
    count = 0
    for row in _rows(connection, "checkpoint", columns, "id"):
        count += 1
        own = pieces.pop(row.id, [])
        problem = _checkpoint_problem(row, specs.get(row.layout), own, lists.get(row.id, []), segments)
        if problem:
            found.checkpoints.add(row.id)
            found.add(f"checkpoint {row.id}", problem, "it goes, its turns are read again")
    if pieces:
        found.links = True
        found.add("recurrent values", f"those of {len(pieces)} checkpoints that are not there", "they go")
    found.counted = (0, 0, count)


def _checkpoint_problem(
    row: Any, spec: StateSpec | None, pieces: list[Any], listed: list[int], segments: dict[int, tuple[Digested, str]]
) -> str:
    if not isinstance(row.ids, bytes) or not _is_int(row.position) or len(row.ids) != 4 * row.position:
        return "its ids are not readable"
    if spec is None or not isinstance(row.lineage, str):
        return f"its layout {row.layout!r} is not known"
    try:
        ids = as_ids(np.frombuffer(row.ids, "<i4"))
        keys = prefix_keys(row.layout, row.lineage, ids, [anchor(row.position), row.position])
    except (ValueError, UnicodeError) as err:
        return f"its ids are not readable ({err})"
    if keys != [row.anchor, row.key]:
        return "its ids are not those that it is named by"
    broken = next((p for p in pieces if isinstance(p, str)), "")
    if broken:
        return f"{broken.replace('its numbers', 'its recurrent values', 1)}"
    missing = [s for s in listed if s not in segments]
    if missing:
        return f"its KV rows {missing[0]} are damaged or missing"
    rows = [segments[s][0] for s in listed]
    for parts, end, name in (
        ([p[:3] for p in pieces], recurrent_values(spec), "recurrent values"),
        (rows, row.position if spec.rows else 0, "KV rows"),
    ):
        at = 0
        for first, last, _ in parts:
            if first != at:
                break
            at = last
        if at != end or (parts and parts[-1][1] != end):
            return f"its {name} from {at} on are missing"
    if digest(row.position, rows, [p[:3] for p in pieces]) != row.digest:
        return "it does not consist of the parts that were written"
    if row.recurrent_nbytes != sum(p[3] for p in pieces):
        return "its size is not the one that was written"
    return ""


def _turns(connection: Connection, found: Findings) -> None:
    columns = (
        "seq id session parent depth length chain messages answer ids_shared ids text_shared text prompt_tokens "
        "finish complete created_at"
    )
    count = 0
    for row in _rows(connection, "turn", columns, "seq"):
        count += 1
        above = found.told.get(row.parent) if row.parent is not None else None
        problem = ""
        messages: tuple[Message, ...] = ()
        if not is_text(row.id) or not is_text(row.session):
            problem = "its name is not readable"
        elif row.parent is not None and above is None:
            problem = "what was said before it is not there any more"
        else:
            try:
                parsed = json.loads(row.messages), json.loads(row.answer)
                messages = tuple(Message.from_json(m) for m in (*parsed[0], parsed[1]))
                json.dumps([m.to_json() for m in messages], ensure_ascii=False).encode()
            except (ValueError, TypeError, AttributeError) as err:
                problem = f"what was said in it is not readable ({err})"
        if problem:
            found.turns.add(row.id)
            found.add(f"turn {row.id!r} of session {row.session!r}", problem, "it goes, and what was said after it")
            continue
        _told(row, above, messages, found)
    found.counted = (0, count, found.counted[2])


def _told(row: Any, above: Told | None, messages: tuple[Message, ...], found: Findings) -> None:
    """A turn whose messages can be read: is the rest right too?"""
    depth, length = (above.depth + 1, above.length) if above else (0, 0)
    chain = (above.chain if above else Chain()).then(messages)
    what = f"turn {row.id!r} of session {row.session!r}"
    length += len(messages)
    if (row.depth, row.length, row.chain) != (depth, length, chain.digest()):
        found.chains[row.id] = (depth, length, chain.digest())
        found.add(what, "its words are not those that were hashed", "they are kept as they can be read now")
    n_ids = n_text = 0
    fits = isinstance(row.ids, bytes) and len(row.ids) % 4 == 0 and _is_int(row.ids_shared, row.text_shared)
    fits = fits and is_text(row.text) and _is_int(row.prompt_tokens, row.created_at) and isinstance(row.finish, str)
    if fits and row.ids_shared <= (above.ids if above else 0) and row.text_shared <= (above.text if above else 0):
        n_ids, n_text = row.ids_shared + len(row.ids) // 4, row.text_shared + len(row.text)
        fits = (not row.ids or int(np.frombuffer(row.ids, "<i4").min()) >= 0) and row.complete in (0, 1)
    else:
        fits = False
    if not fits:
        found.unread.add(row.id)
        found.add(what, "its tokens are not readable", "its words are kept, and are read again")
        n_ids = n_text = 0
    found.told[row.id] = Told(row.parent, row.session, row.seq, depth, length, chain, n_ids, n_text)


def _turn_ids(connection: Connection, found: Findings) -> None:
    """A turn's ids begin with those of the checkpoints that it links to, which are named by a hash of theirs."""
    joined = (
        _raw("turn_checkpoint", "turn checkpoint")
        .add_columns(*(literal_column(f"t.{c}").label(c) for c in ("ids", "ids_shared", "session")))
        .add_columns(literal_column("c.ids").label("fed"))
        .join(text("turn t"), text("t.id = turn_checkpoint.turn"))
        .join(text("checkpoint c"), text("c.id = turn_checkpoint.checkpoint"))
    )
    for row in connection.execute(joined.execution_options(yield_per=_AT_ONCE)):
        told = found.told.get(row.turn)
        if told is None or not told.ids or row.checkpoint in found.checkpoints or row.turn in found.unread:
            continue
        own, fed = np.frombuffer(row.ids, "<i4"), np.frombuffer(row.fed, "<i4")[row.ids_shared :]
        n = min(len(own), len(fed))
        if not np.array_equal(own[:n], fed[:n]):
            found.unread.add(row.turn)
            what = f"turn {row.turn!r} of session {row.session!r}"
            found.add(what, "its tokens are not those that were fed", "its words are kept, and are read again")


def _sessions(connection: Connection, found: Findings) -> None:
    alive: dict[str, set[str]] = {}
    for name, told in found.told.items():
        alive.setdefault(told.session, set()).add(name)
    owners = set(alive)
    columns = "id created_at last_used_at model lineage clock head turns title pinned imported base root retained"
    seen: set[str] = set()
    for row in _rows(connection, "session", columns, "id"):
        seen.add(row.id)
        texts = (row.id, row.model, row.lineage, row.clock, row.title, row.imported)
        numbers = _is_int(row.created_at, row.last_used_at, row.turns) and row.pinned in (0, 1)
        what = f"session {row.id!r}"
        inherited = path_to(row.base, found.told)
        mine = alive.get(row.id, set()) | set(inherited)
        if not mine:
            found.sessions.add(row.id)
            found.add(what, "none of its turns can be read", "it goes")
        elif not all(map(is_text, texts)) or not numbers or not is_moment(row.clock) or row.retained not in (0, 1, 2):
            found.sessions.add(row.id)
            found.add(what, "what is known about it is not readable", "its turns are kept, the rest is made anew")
        elif row.head not in mine or row.turns != len(mine):
            found.sessions.add(row.id)
            found.add(what, "its current turn or their number is not right", "it goes on from its newest turn")
        elif (row.base, row.root) != ((inherited[0], inherited[-1]) if inherited else (None, None)):
            found.sessions.add(row.id)
            found.add(what, "the turn that it was forked from is not right", "it keeps the turns that it has")
    for session_id in sorted(owners - seen):
        found.homeless.add(session_id)
        found.add(f"session {session_id!r}", "it is missing, its turns are there", "it is made anew from its turns")
    found.counted = (len(seen), *found.counted[1:])


def path_to(turn: object, told: dict[str, Told]) -> list[str]:
    """The turn and all above it, up to the root; none if it cannot be read."""
    path: list[str] = []
    at = turn if isinstance(turn, str) and turn in told else None
    while at is not None:
        path.append(at)
        at = told[at].parent
    return path


def is_moment(value: str) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _links(connection: Connection, found: Findings) -> None:
    """Rows that point at nothing, and segments that nobody points at.

    A checkpoint without a turn is none of the damages: it may be written ahead of one, and is swept if none comes.
    """
    broken = connection.execute(text("PRAGMA foreign_key_check")).all()
    tables = sorted({str(row[0]) for row in broken} - {"turn", "piece"})  # of which others speak already
    if tables:
        found.links = True
        found.add("links", f"rows of {', '.join(tables)} point at what is not there", "they go, nothing else does")
    unlisted = "SELECT id FROM segment WHERE id NOT IN (SELECT segment FROM checkpoint_segment)"
    loose = [n for n in connection.scalars(text(unlisted)) if n not in found.segments]
    if loose:
        found.segments.update(loose)
        found.add("KV rows", f"{len(loose)} parts belong to no checkpoint", "they go")


def _total(connection: Connection, found: Findings) -> None:
    sizes = "SELECT (SELECT coalesce(sum(recurrent_nbytes), 0) FROM checkpoint) + "
    sizes += "(SELECT coalesce(sum(nbytes), 0) FROM segment)"
    really, said = connection.execute(text(sizes)).scalar_one(), stored_bytes(connection)
    if really != said and not found.damages:
        found.links = True
        found.add("the total", f"{said} bytes are counted, {really} are stored", "it is counted again")
