"""Check of conversations: turns, the sessions that have them, and replies. A part of check.py."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, literal_column
from sqlalchemy import text as sql

from ssmd.sessions.checkpoint import prefix_keys
from ssmd.sessions.fsck.findings import (
    AT_ONCE,
    Findings,
    Home,
    ReadableTurn,
    is_count,
    is_moment,
    is_text,
    is_time,
    raw_columns,
    raw_rows,
)
from ssmd.sessions.line import NOTHING, SILENCE, Line, Passage, anchor
from ssmd.sessions.match import Chain
from ssmd.sessions.rows.replies import said_in_reply
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import said_in, seal, turn_of
from ssmd.text.messages import Message


def examine_transcripts(connection: Connection, found: Findings) -> None:
    """Check turns, sessions and replies. `found` has the broken checkpoints already."""
    _turns(connection, found)
    _turn_ids(connection, found)
    _sessions(connection, found)
    _replies(connection, found)


def _turns(connection: Connection, found: Findings) -> None:
    count = 0
    for row in raw_rows(connection, "turn", " ".join(c.name for c in turn_table.columns), "seq"):
        count += 1
        above = found.told.get(row.parent) if row.parent is not None else None
        said: tuple[Message, ...] = ()
        problem = ""
        if not is_text(row.id, row.session):
            problem = "its id is not readable"
        elif row.parent is not None and above is None:
            problem = "the turns before it are missing"
        else:
            try:
                messages, answer = said_in(row.items, row.answer)
                said = (*messages, answer)
                json.dumps([m.to_json() for m in said], ensure_ascii=False).encode()
            except (ValueError, TypeError, AttributeError) as err:
                problem = f"its messages are not readable ({err})"
        if problem:
            found.turns.add(row.seq)
            found.broken[row.id] = row.parent
            found.add(_name(row), problem, "it is removed, with all turns after it")
            continue
        _told(row, above, said, found)
    found.counted = (0, count, found.counted[2])


def _name(row: Any) -> str:
    return f"turn {row.id!r} of session {row.session!r}"


def _told(row: Any, above: ReadableTurn | None, said: tuple[Message, ...], found: Findings) -> None:
    """Check the rest of a turn whose messages can be read."""
    depth, length = (above.depth + 1, above.length) if above else (0, 0)
    chain = above.chain.then(said, above.said[-1].tool_calls) if above else Chain().then(said)
    length += len(said)
    try:
        sound = seal(row._mapping) == row.checksum and is_text(row.owner)
    except (TypeError, ValueError):
        sound = False
    turn = turn_of(row) if sound else None
    ids, text, stem = (turn.ids, turn.text, turn.stem) if turn else (NOTHING, SILENCE, None)
    if (row.depth, row.length, row.chain, row.whole) != (depth, length, chain.said, chain.whole):
        found.reworded.add(row.id)
        found.add(_name(row), "its messages do not match their hash", "they are kept as they can be read now")
    if not sound:
        found.unread.add(row.id)
        found.add(_name(row), "it was altered", "its messages are kept, and are read again")
    elif stem is not None and not _goes_on(found.told.get(stem), ids, text):
        ids, text, stem = NOTHING, SILENCE, None
        found.unread.add(row.id)
        found.add(_name(row), "its tokens do not continue those of its stem", "its messages are read again")
    created_at = row.created_at if is_time(row.created_at) else 0
    lineage = row.lineage if is_text(row.lineage) else ""
    found.told[row.id] = ReadableTurn(
        *(row.parent, row.session, row.seq, depth, length, chain, said, stem, ids, text, created_at, lineage)
    )


def _goes_on(stem: ReadableTurn | None, ids: Line, text: Passage) -> bool:
    if stem is None or len(stem.ids) != ids.start or len(stem.text) != text.start:
        return False
    return stem.ids.hash(ids.start) == ids.before and stem.text.hash(text.start) == text.before


def _turn_ids(connection: Connection, found: Findings) -> None:
    """Find checkpoints whose key does not match the ids of the turns that link to them.

    Checkpoints of a prompt are left out: a template may write its last tokens in another way once the answer follows.
    """
    columns = "id kind position key anchor layout lineage"
    joined = (
        raw_columns("turn_checkpoint", "turn")
        .add_columns(*(literal_column(f"c.{c}").label(c) for c in columns.split()))
        .join(sql("checkpoint c"), sql("c.id = turn_checkpoint.checkpoint"))
    )
    for row in connection.execute(joined.execution_options(yield_per=AT_ONCE)):
        told = found.told.get(row.turn)
        if told is None or row.id in found.checkpoints or not is_text(row.layout, row.lineage):
            continue
        while told.ids.start > row.position and told.stem is not None:
            told = found.told[told.stem]
        line, at = told.ids, row.position
        if not line.start <= at <= len(line) or (not len(line.own) and line.start != at):
            continue
        named = prefix_keys(row.layout, row.lineage, line, [anchor(at), at]) == [row.anchor, row.key]
        if not named and row.kind != "user":
            found.checkpoints.add(row.id)
            found.add(f"checkpoint {row.id}", "its ids do not match its key", "it is removed, its turns are read again")


class _Tree:
    """The turns of each session: its own, and for a fork its base and the turns above that."""

    def __init__(self, found: Findings) -> None:
        self.told = found.told
        self.owners = {name: told.session for name, told in found.told.items()}
        self.bases: dict[str, str | None] = {}
        self._paths: dict[str, frozenset[str]] = {}

    def above(self, turn: str | None) -> frozenset[str]:
        """Return the turn and all turns above it."""
        path = []
        at = turn
        while at is not None:
            path.append(at)
            at = self.told[at].parent
        return frozenset(path)

    def inherited(self, session: str) -> frozenset[str]:
        if session not in self._paths:
            self._paths[session] = self.above(self.bases.get(session))
        return self._paths[session]

    def settle(self) -> dict[str, str]:
        """Let every turn continue one that its session has. Returns the turns that get another owner for that."""
        moved = {}
        for name, told in self.told.items():
            owner, parent = told.session, told.parent
            if parent is None or self.owners[parent] == owner or parent in self.inherited(owner):
                continue
            base = self.bases.get(owner)
            if base is None or base in self.above(parent):
                # The session of a turn also had the turn's parent, so it begins there at the latest.
                self.bases[owner] = parent
                self._paths.pop(owner, None)
            else:
                self.owners[name] = moved[name] = self.owners[parent]
        return moved

    def homes(self) -> dict[str, Home]:
        own: dict[str, set[str]] = {session: set() for session in self.bases}
        for name, session in self.owners.items():
            own.setdefault(session, set()).add(name)
        return {session: self._home(session, turns) for session, turns in own.items()}

    def _home(self, session: str, own: set[str]) -> Home:
        path = self.inherited(session)
        root = next((turn for turn in path if self.told[turn].parent is None), None)
        return Home(self.bases.get(session), root, frozenset(own) | path)


def _sessions(connection: Connection, found: Findings) -> None:
    columns = (
        "rowid id created_at last_used_at model lineage clock owner head turns title pinned imported base root "
        "own_nbytes shared_nbytes retained"
    )
    rows = list(raw_rows(connection, "session", columns, "rowid"))
    tree = _Tree(found)
    for row in rows:
        if is_text(row.id):
            tree.bases[row.id] = _readable_base(row, found)
    for name, session in tree.settle().items():
        found.owners[name] = session
        what = f"turn {name!r} of session {found.told[name].session!r}"
        found.add(what, "it continues a turn of another session", f"it becomes a part of session {session!r}")
    homes = tree.homes()
    for row in rows:
        home = homes.pop(row.id, None) if is_text(row.id) else None
        what = f"session {row.id!r}"
        if home is None or not home.turns:
            found.sessions.add(row.rowid)
            found.add(what, "none of its turns can be read", "it is removed")
        elif problem := _session_problem(row, home):
            found.homes[row.id] = home
            found.add(what, *problem)
    for session, home in sorted(homes.items()):
        found.homes[session] = home
        found.add(f"session {session!r}", "it is missing, but its turns exist", "it is made again from its turns")
    found.counted = (len(rows), *found.counted[1:])


def _readable_base(row: Any, found: Findings) -> str | None:
    """Return the turn at which a fork begins, or the deepest readable turn above it."""
    at, seen = row.base, set[object]()
    while at in found.broken and at not in seen:
        seen.add(at)
        at = found.broken[at]
    if at in found.told:
        return str(at)
    root = found.told.get(row.root) if row.base is not None else None
    return str(row.root) if root is not None and root.parent is None else None


def _session_problem(row: Any, home: Home) -> tuple[str, str] | None:
    """Return (problem, loss) of a session's row; None if it is sound."""
    numbers = is_time(row.created_at, row.last_used_at) and is_count(row.turns) and row.pinned in (0, 1)
    numbers = numbers and all(n is None or is_count(n) for n in (row.own_nbytes, row.shared_nbytes))
    texts = is_text(row.id, row.model, row.lineage, row.title, row.imported, row.owner) and is_moment(row.clock)
    if not texts or not numbers or row.retained not in (0, 1, 2):
        return "its data are not readable", "its turns are kept, the rest is made again"
    if (row.base, row.root) != (home.base, home.root):
        kept = f"it begins at {home.base!r}" if home.base is not None else "it keeps its own turns"
        return "the turn that it was forked at is wrong or missing", kept
    if row.head not in home.turns or row.turns != len(home.turns):
        return "its current turn or the number of its turns is wrong", "it continues from its newest turn"
    return None


def _replies(connection: Connection, found: Findings) -> None:
    for row in raw_rows(connection, "reply", "id key body turn turns complete expires_at answer", "id"):
        said = said_in_reply(row)
        names = [row.turn, *said[0]] if said else []
        fits = all(isinstance(h, bytes) and len(h) == 32 for h in (row.key, row.body))
        fits = fits and row.complete in (0, 1) and is_count(row.expires_at) and is_text(*names) and len(names) > 1
        problem = "" if fits else "it is not readable"
        if fits and not (row.turn == names[1] and all(n in found.told for n in names)):
            problem = "its turns are missing"
        if problem:
            found.replies.add(row.id)
            found.add(f"reply {row.id}", problem, "it is removed: a repeated request is answered again")
