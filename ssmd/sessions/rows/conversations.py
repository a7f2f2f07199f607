"""Conversations in the database: sessions whose items stand in an order of their own, read by a model or not.

The first turn of such a session has its digits and no messages. Rows of facts belong to it: one for the conversation,
and one for each entry of its list. An entry is a turn: a response, or items that a client added. Of a response it has
only the input of that request, not all that the model read since its parent, and the answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, update

from ssmd.sessions.line import NOTHING, SILENCE
from ssmd.sessions.rows import sessions, turns
from ssmd.sessions.rows.replies import read_parts, write_facts
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.turn import Domain, NewTurn, SessionInfo, TurnRemoved, UnknownSession
from ssmd.text.messages import Message

OPENING = "conversation"  # the finish of a conversation's first turn
ADDED = "items"  # the finish of a turn of items that a client added
ANSWER = Message("assistant", "", name="ssmd_conversation")  # no request echoes it, so none continues such a turn
NO_LINEAGE = "0" * 64  # of a conversation that no model has read
_CONVERSATION, _TURN = "conv_", "turn_"
_DIGITS = 24
_RECORD = "conversation"  # the part of the first turn's facts that describes the conversation
_PLACE_DIGITS = 8  # of the id of a turn of added items: the number of its entry
_s = session_table.c


@dataclass(frozen=True)
class Conversation:
    """A stored conversation. entries: how many its list has, numbered from 1; those of removed turns count too."""

    id: str
    created: int  # seconds since 1970
    metadata: Mapping[str, str]
    entries: int = 0
    # The last response, as (entry, turn): the turns up to it have all messages of the list so far. None: none has.
    whole: tuple[int, str] | None = None
    withdrawn: int = 0  # items that were left out

    def has_items_of(self, earlier: Conversation) -> bool:
        """Return True if no item came or went since it was read earlier."""
        return (self.entries, self.withdrawn) == (earlier.entries, earlier.withdrawn)

    @property
    def opening(self) -> str:
        """Return the id of its first turn."""
        return _TURN + self.id.removeprefix(_CONVERSATION)


@dataclass(frozen=True)
class Entry:
    """An entry of a conversation's list. given: messages of its own at the end of the turn's input."""

    number: int = 0
    turn: str = ""
    given: int = 0
    answered: bool = False  # the turn's answer belongs to it
    gone: tuple[str, ...] = ()  # ids of the items that were deleted
    sent: str = ""  # a hash of the request that added it
    origins: Mapping[str, Sequence[str | None]] = field(default_factory=dict)  # of its calls, as a response's facts
    custom: Sequence[str] = ()  # ids of calls of custom tools, of which it has the results


def read_conversation(connection: Connection, name: str, domain: Domain) -> Conversation:
    """Read a conversation. Raises UnknownSession."""
    sessions.session_row(connection, name, domain)
    found = _read(connection, name)
    if found is None:
        raise UnknownSession(f"session {name!r} is no conversation")
    return found


def _read(connection: Connection, name: str) -> Conversation | None:
    if not name.startswith(_CONVERSATION):
        return None
    one = Conversation(name, 0, {})
    record = read_parts(connection, one.opening, [_RECORD]).get(_RECORD)
    if record is None:
        return None
    whole = record["whole"]
    said = {key: record[key] for key in ("created", "metadata", "entries", "withdrawn")}
    return replace(one, **said, whole=None if whole is None else (whole[0], whole[1]))


def read_entries(connection: Connection, one: Conversation, numbers: Sequence[int]) -> list[Entry]:
    """Read entries of a conversation, in the order of `numbers`. Those that do not exist are left out."""
    found = read_parts(connection, one.opening, [str(n) for n in numbers])
    rows = [(n, found[str(n)]) for n in numbers if str(n) in found]
    return [Entry(n, **{**row, "gone": tuple(row["gone"])}) for n, row in rows]


def place_of(turn: str, one: Conversation) -> int | None:
    """Return the number of the entry that a turn of added items is; None for another turn."""
    digits = turn.removeprefix(_TURN)
    mine = digits[:-_PLACE_DIGITS] == one.opening.removeprefix(_TURN)[:-_PLACE_DIGITS]
    return int(digits[-_PLACE_DIGITS:], 16) if mine and turn != one.opening else None


def create(
    connection: Connection, metadata: Mapping[str, str], clock: datetime, owner: str, quota: int | None
) -> Conversation:
    """Write a new conversation without items. Raises StoreError if conversations take all bytes that they may.

    clock: the moment that its templates see. quota: of the store.
    """
    now = datetime.now(UTC)
    # The last digits are not those of an entry's number.
    digits = f"{secrets.token_hex((_DIGITS - _PLACE_DIGITS) // 2)}{'f' * _PLACE_DIGITS}"
    one = Conversation(_CONVERSATION + digits, int(now.timestamp()), metadata)
    info = SessionInfo(one.id, "", NO_LINEAGE, clock, owner=owner, title="")
    turn = _turn(one, one.opening, None, (), OPENING, now)
    sessions.touch_session(connection, [turn], info)
    turns.insert_turns(connection, [turn], NO_LINEAGE, owner)
    turns.bound_text(connection, quota)
    _write(connection, one)
    return one


def describe(connection: Connection, name: str, metadata: Mapping[str, str], domain: Domain) -> Conversation:
    """Give a conversation other metadata. Raises UnknownSession."""
    one = replace(read_conversation(connection, name, domain), metadata=metadata)
    _write(connection, one)
    return one


def add(
    connection: Connection,
    one: Conversation,
    messages: Sequence[Message],
    entry: Entry,
    quota: int | None,
    domain: Domain,
) -> Entry:
    """Add messages of a client to a conversation, as its next entry. Raises UnknownSession and StoreError.

    entry: its facts, but for its place. quota: of the store.
    """
    row = sessions.session_row(connection, one.id, domain)
    info = sessions.read_info(connection, one.id, domain)
    number = one.entries + 1
    name = f"{one.opening[:-_PLACE_DIGITS]}{number:0{_PLACE_DIGITS}x}"
    turn = _turn(one, name, row.head, messages, ADDED, datetime.now(UTC))
    sessions.touch_session(connection, [turn], info)
    turns.insert_turns(connection, [turn], info.lineage, info.owner)
    turns.bound_text(connection, quota)
    entry = replace(entry, number=number, turn=name, given=len(messages))
    _extend(connection, one, entry, messages)
    return entry


def append(connection: Connection, turn: NewTurn, facts: Mapping[str, Any]) -> None:
    """Add a response to the conversation that its facts name, in the transaction of its turn.

    Raises TurnRemoved if the conversation is not as the request read it.
    """
    told = facts["conversation"]
    one = _read(connection, told["id"])
    if one is None or one.entries != told["entry"] - 1:
        raise TurnRemoved(f"conversation {told['id']!r} was changed while its response was under way")
    entry = Entry(told["entry"], turn.id, told["given"], True, custom=told["custom"])
    _extend(connection, replace(one, whole=(entry.number, turn.id)), entry, turn.messages)


def withdraw(connection: Connection, one: Conversation, entry: Entry, items: Collection[str]) -> None:
    """Leave items out of an entry from now on. Their text goes with the conversation."""
    changed = replace(entry, gone=(*entry.gone, *items))
    _write_entry(connection, one, changed)
    whole = None if one.whole is None or entry.number <= one.whole[0] else one.whole
    _write(connection, replace(one, whole=whole, withdrawn=one.withdrawn + len(items)))


def _turn(
    one: Conversation, name: str, parent: str | None, messages: Sequence[Message], finish: str, now: datetime
) -> NewTurn:
    return NewTurn(
        id=name,
        session=one.id,
        parent=parent,
        messages=tuple(messages),
        answer=ANSWER,
        ids=NOTHING,
        prompt_tokens=0,
        text=SILENCE,
        finish=finish,
        complete=True,
        created_at=now,
    )


def _extend(connection: Connection, one: Conversation, entry: Entry, messages: Sequence[Message]) -> None:
    _write_entry(connection, one, entry)
    _write(connection, replace(one, entries=entry.number))
    title = sessions.default_title(messages)
    connection.execute(update(session_table).where(_s.id == one.id, _s.title == "").values(title=title))


def _write_entry(connection: Connection, one: Conversation, entry: Entry) -> None:
    row = asdict(entry)
    write_facts(connection, one.opening, row, str(row.pop("number")))


def _write(connection: Connection, one: Conversation) -> None:
    row = asdict(one)
    del row["id"]
    write_facts(connection, one.opening, row, _RECORD)
