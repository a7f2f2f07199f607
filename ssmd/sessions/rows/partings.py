"""Partings: the place at which a stored prompt differs from an earlier one of the same owner, and the words there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select

from ssmd.sessions.line import Ids
from ssmd.sessions.rows.schema import by, seen
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import as_they_are, read_turn, turn_of
from ssmd.sessions.turn import Domain, StoreError, Turn

_MOST = 64  # earlier turns with one parent that are compared, the newest ones
_BEFORE, _AFTER = 24, 48  # characters that are shown before the place and behind it

_t, _mine = turn_table.c, turn_table.alias()
_EARLIER = (
    select(turn_table)
    .select_from(turn_table)
    .join(_mine, _mine.c.id == bindparam("turn"))
    .join(session_table, session_table.c.id == _t.session)
    .where(
        seen(session_table.c.owner),  # a fork's beginning may be another owner's, whose other sessions it does not see
        _t.parent.is_not_distinct_from(bindparam("parent")),
        *(_t.seq < _mine.c.seq, _t.owner == _mine.c.owner, _t.lineage == _mine.c.lineage),
    )
    .order_by(_t.seq.desc())
    .limit(_MOST)
)


@dataclass(frozen=True)
class Parting:
    """The place at which a turn's prompt differs from an earlier turn. Texts are as the model reads them."""

    position: int  # tokens that both begin with
    session: str  # of the earlier turn
    turn: str  # the earlier turn
    before: str  # the last words that both have
    here: str  # words of this prompt behind them; "" if only the tokens differ
    there: str  # words of the earlier turn


@dataclass(frozen=True)
class _Whole:
    """All ids and all text of a turn."""

    turn: Turn
    ids: Ids
    text: str


def read_partings(connection: Connection, turns: Sequence[Turn], domain: Domain) -> Mapping[str, Parting]:
    """Return where the prompts of these turns differ from earlier ones that the domain sees, by turn.

    A prompt is compared with the turn that it continues. If it goes on from there, it is compared with earlier turns
    beside it: those that go on from there too, or begin a conversation too. The one that shares most counts.
    Left out are turns that go on from all these, and those whose text is not stored.
    """
    reader = _Reader(connection, turns, domain)
    found = {turn.id: reader.parting(turn) for turn in turns}
    return {turn: parting for turn, parting in found.items() if parting is not None}


class _Reader:
    """Reads turns, each once."""

    def __init__(self, connection: Connection, turns: Sequence[Turn], domain: Domain) -> None:
        self._connection, self._seen = connection, by(domain)
        self._turns = {turn.id: turn for turn in turns}

    def parting(self, turn: Turn) -> Parting | None:
        """Return where a turn's prompt differs from an earlier one, as of read_partings."""
        mine = self._whole(turn)
        if mine is None:
            return None
        prompt, at = mine.ids[: turn.prompt_tokens], turn.parent
        above = None if at is None else self._whole_of(at)
        if above is not None and (shared := _shared(prompt, above.ids)) < len(above.ids):
            return _between(mine, above, shared)
        closest, most = None, 0
        while True:
            best = max(self._earlier(turn, at), key=lambda one: _shared(prompt, one.ids), default=None)
            if best is None or (shared := _shared(prompt, best.ids)) <= most:
                break
            closest, most, at = best, shared, best.turn.id
            if shared < len(best.ids):
                break
        if closest is None or most in (len(prompt), len(closest.ids)):  # the same prompt, or it goes on from that turn
            return None
        return _between(mine, closest, most)

    def _earlier(self, turn: Turn, parent: str | None) -> Iterator[_Whole]:
        """Yield the turns below a parent, or those that begin a conversation, that were written before a turn."""
        with as_they_are(self._connection):
            rows = self._connection.execute(_EARLIER, {"turn": turn.id, "parent": parent, **self._seen}).all()
        for row in rows:
            if (found := self._whole(turn_of(row))) is not None:
                yield found

    def _whole_of(self, name: str) -> _Whole | None:
        try:
            return self._whole(self._turn(name))
        except StoreError:
            return None

    def _turn(self, name: str) -> Turn:
        if name not in self._turns:
            self._turns[name] = read_turn(self._connection, name)
        return self._turns[name]

    def _whole(self, turn: Turn) -> _Whole | None:
        """Read all ids and all text of a turn, with those of the turns above it. None if some are lost."""
        pieces = [turn]
        try:
            while pieces[-1].sound and (stem := pieces[-1].stem) is not None:
                pieces.append(self._turn(stem))
            pieces.reverse()
            ids = turn.ids.after([one.ids for one in pieces[:-1]])
        except (StoreError, ValueError):
            return None
        text = "".join(one.text.own for one in pieces)
        return _Whole(turn, ids.own, text) if text and len(ids) == len(ids.own) > 0 else None


def _between(mine: _Whole, other: _Whole, position: int) -> Parting:
    pairs = enumerate(zip(mine.text, other.text, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(mine.text), len(other.text)))
    before = mine.text[max(0, at - _BEFORE) : at]
    here, there = mine.text[at : at + _AFTER], other.text[at : at + _AFTER]
    return Parting(position, other.turn.session, other.turn.id, before, here, there)


def _shared(a: Ids, b: Ids) -> int:
    """Count the ids with which both begin."""
    least = min(len(a), len(b))
    same = a[:least] == b[:least]
    return least if same.all() else int(same.argmin())
