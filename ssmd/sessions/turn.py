"""Sessions and turns, as they are handed to the store and read back, exported as items, and seen by a trust domain.

Messages are stored and exported as a list of items, named as in OpenAI's Responses. A message is an item. Each call of
an assistant's message is an item right after it. A call's result is an item too.

A trust domain says which owners' rows a caller can read, and which owner its new rows get.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ssmd.sessions.line import Line, Passage
from ssmd.sessions.match import Chain
from ssmd.text.messages import Message, ToolCall

ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TITLE = 200  # characters
BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # Bidi_Control of Unicode
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol that are drawn as nothing
Item = dict[str, Any]


class StoreError(Exception):
    """An operation that the store could not do. Nothing was changed. The message says what to do."""

    reason = "error"  # a code for metrics and /health


class TurnRemoved(StoreError):
    """The turn or session to continue was removed meanwhile. The store itself is sound."""


class UnknownSession(StoreError):
    """An id that no session or turn has."""


class UnknownTurn(UnknownSession):
    """A turn id that the session does not have."""


@dataclass(frozen=True)
class SessionInfo:
    """The facts of a session that do not depend on its messages: model, lineage, clock."""

    id: str
    model: str  # that answered last
    lineage: str  # of that model
    clock: datetime  # the moment its templates see, frozen, in the zone of the daemon that began it
    pinned: bool = False
    imported: str | None = None  # the import it descends from
    owner: str = ""
    title: str | None = field(default=None, compare=False)  # given to it when it is new; None: its default title
    # It was read from the store: a turn of it never starts a new session.
    known: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Session:
    """A stored session."""

    info: SessionInfo
    created_at: datetime
    last_used_at: datetime
    head: str  # its current turn
    turns: int  # all that it has, a fork's beginning included
    title: str  # the one it was given, or how its first user message begins
    nbytes: int  # bytes of the checkpoints of its own turns
    own_nbytes: int  # those of them that no other session needs
    base: str | None = None  # turn a fork begins at; it and those above it may be another session's

    @property
    def id(self) -> str:
        return self.info.id


@dataclass(frozen=True)
class RenderedPrefix:
    """The place where the last message of a rendering begins. The text before it stays as later messages come."""

    messages: int  # shown before it
    characters: int  # of text before it
    template: str  # hash of the template, tools and variables that rendered it


@dataclass(frozen=True, eq=False)
class NewTurn:
    """A turn that is to be stored: one exchange of a conversation.

    ids and text cover the whole rendered conversation, up to the end of the answer's text. In a turn that was rendered
    anew, they end where the next message begins, or at the last control token before that. Both are empty if only the
    messages are known. Of both, enough is at hand to see whether they go on from a turn above.
    """

    id: str
    session: str
    parent: str | None  # the turn before it; None at the root
    messages: tuple[Message, ...]  # the input since the parent's answer, without a beginning that was continued
    answer: Message  # the assistant's whole message, with a beginning that was continued
    ids: Line
    prompt_tokens: int
    text: Passage  # of those ids, rendered and escaped
    finish: str
    complete: bool  # False if a disconnect or a shutdown cut it off
    created_at: datetime
    lineage: str = field(default="", kw_only=True)  # of the model whose ids these are; "" to be stored: the session's
    settled: RenderedPrefix | None = field(default=None, kw_only=True)  # None if the template may change what it wrote
    cut: int = field(default=0, kw_only=True)  # messages after the system prompt that had no room in the context

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages of this turn alone: its input, then its answer."""
        return (*self.messages, self.answer)


@dataclass(frozen=True, eq=False)
class Turn(NewTurn):
    """A stored turn."""

    stem: str | None  # turn above whose ids and text its own go on from; None: they stand alone
    root: str  # the first turn above it, or itself
    depth: int  # turns above it
    length: int  # messages of the conversation up to its answer
    chain: Chain  # of those messages
    sound: bool = True  # False if stored data were altered: ids and text are then empty, messages as far as readable


def conversation(path: Sequence[NewTurn]) -> tuple[Message, ...]:
    """Return all messages of a path, root first."""
    return tuple(m for turn in path for m in turn.conversation)


def without(messages: Sequence[Message], cut: int) -> Sequence[Message]:
    """Return the messages without the first `cut` after the system prompt."""
    head = system_prompt(messages)
    return (*messages[:head], *messages[head + cut :]) if cut else messages


def system_prompt(messages: Sequence[Message]) -> int:
    """Count the messages at the beginning that are the system prompt."""
    return next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))


def title_problem(title: str) -> str:
    """Return why a text cannot be a session's title, to follow the word "title"; "" if it can."""
    if len(title) > MAX_TITLE or not any(unicodedata.category(c)[0] not in "CMZ" and c not in _BLANK for c in title):
        return f"must have 1 to {MAX_TITLE} characters, at least one of them visible"
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in BIDI for c in title):
        return "must not have control characters, line breaks, or characters that change the direction of text"
    return ""


def check_id(kind: str, value: str) -> str:
    """Return the id. Raises StoreError if it could be mistaken for a path or a command."""
    if not isinstance(value, str) or not ID_PATTERN.fullmatch(value):
        raise StoreError(f"{kind} id {value!r} is not allowed: an id has 1 to 64 letters, digits, _ or -")
    return value


def local_now() -> datetime:
    """Return the time of this machine's zone, as templates get it and as a session stores it.

    The zone is an offset from UTC without a name, so that a template renders the same before and after it was stored.
    """
    return datetime.fromisoformat(datetime.now(UTC).astimezone().isoformat())


@dataclass(frozen=True)
class Domain:
    """The owners whose rows a caller sees in a store, and the owner of what it writes."""

    owner: str = ""  # of new rows; "": no owner
    sees: tuple[str, ...] | None = None  # owners whose rows it sees; None: all

    def has(self, owner: object) -> bool:
        """Return True if rows of this owner are visible."""
        return self.sees is None or owner in self.sees


EVERYBODY = Domain()  # sees all rows
NOBODY = Domain(sees=())


def items_of(turn_id: str, messages: Sequence[Message]) -> tuple[list[Item], list[Item]]:
    """Convert a turn's messages to items: (input, answer). The answer is the last message.

    Each item gets an id, which follows from the turn's id and its place.
    """
    said = [list(_items(m)) for m in messages]
    items = [{"id": _id(turn_id, i), **item} for i, item in enumerate(item for one in said for item in one)]
    answer = len(items) - len(said[-1])
    return items[:answer], items[answer:]


def messages_of(items: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Convert items to messages. Raises ValueError, TypeError or KeyError if they are invalid."""
    messages: list[Message] = []
    calls: dict[int, list[ToolCall]] = {}  # by index of their message
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            said = {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
            messages.append(Message.from_json(said | {"name": item.get("name")}))
        elif kind == "function_call":
            if not messages or messages[-1].role != "assistant":
                raise ValueError("a function call does not follow an assistant's message")
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = ToolCall.from_json({"id": item["call_id"], "function": function})
            calls.setdefault(len(messages) - 1, []).append(call)
        elif kind == "message" and item.get("role") != "tool":
            fields = {name: item.get(name) for name in ("role", "content", "name")}
            messages.append(Message.from_json(fields))
        else:
            raise ValueError(f"an item of type {kind!r} is of a newer version")
    for i, made in calls.items():
        messages[i] = replace(messages[i], tool_calls=tuple(made))
    return tuple(messages)


def _items(message: Message) -> Iterable[Item]:
    if message.tool_call_id is not None:
        named = {} if message.name is None else {"name": message.name}
        output = {"call_id": message.tool_call_id, "output": message.content}
        yield {"type": "function_call_output", **output, **named}
        return
    yield {"type": "message", **replace(message, tool_calls=()).to_json()}
    for call in message.tool_calls:
        yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _id(turn_id: str, index: int) -> str:
    return f"item_{hashlib.blake2b(f'{turn_id} {index}'.encode(), digest_size=12).hexdigest()}"


def is_unicode(value: object) -> bool:
    """Return True if a value is a text that can be written as UTF-8."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
