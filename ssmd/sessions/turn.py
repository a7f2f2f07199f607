"""Sessions and turns, as they are handed to the store and read back."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ssmd.sessions.line import Line, Passage
from ssmd.sessions.match import Chain
from ssmd.text.messages import Message

ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TITLE = 200  # characters
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol that are drawn as nothing


class StoreError(Exception):
    """The store could not do what was asked; it is whole and nothing was changed. The message says what to do."""

    reason = "error"  # a code for metrics and /health


class Removed(StoreError):
    """What was to be continued was removed meanwhile: nothing is wrong with the store."""


class UnknownSession(StoreError):
    """No session, or no turn, has that id."""


class UnknownTurn(UnknownSession):
    """The session has no turn of that id."""


@dataclass(frozen=True)
class SessionInfo:
    """What a session is, whatever is said in it: model, lineage, clock.

    model, lineage: of what answered last. clock: the moment its templates see, frozen. imported: the import it descends
    from. owner: whose it is. known: it was read from the store, so that a turn of it is none of a new session.
    """

    id: str
    model: str
    lineage: str
    clock: datetime
    pinned: bool = False
    imported: str | None = None
    owner: str = ""
    known: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Session:
    """A stored session.

    head: its current turn. turns: all that it has, those of its beginning included. title: the one it was given, or
    how its first user message begins. nbytes: the checkpoints of its own turns, `own_nbytes` of which no other session
    needs. base: the turn that a fork begins at: that one and those above it may be another session's.
    """

    info: SessionInfo
    created_at: datetime
    last_used_at: datetime
    head: str
    turns: int
    title: str
    nbytes: int
    own_nbytes: int
    base: str | None = None

    @property
    def id(self) -> str:
        return self.info.id


@dataclass(frozen=True)
class Settled:
    """Where the last message of a rendering begins: whatever is said after it, the text before stays as it is.

    messages: how many of those shown come before it; characters: of text before it. template: a hash of what rendered
    it.
    """

    messages: int
    characters: int
    template: str


@dataclass(frozen=True, eq=False)
class NewTurn:
    """One exchange that is to be stored.

    parent: the turn before it, or None at the root. messages: the input since the parent's answer. answer: the
    assistant's message; where a given beginning was continued it is the whole message, and `messages` leaves the
    beginning out. ids: of the whole rendered conversation up to the end of the answer's text (of one that was rendered
    anew: up to where the next message begins, or the last control token before that). text: what those ids stand for,
    rendered and escaped; both are empty where only the messages are known. Of both so much is at hand that they can be
    told to go on from those of a turn above. complete: False if it was cut off by a disconnect or a shutdown. lineage:
    of the model whose ids these are; "" on the way in: the session's. settled: None where the template is not known to
    keep what it wrote. cut: how many messages after the system prompt the model was not shown, as they had no room in
    its context.
    """

    id: str
    session: str
    parent: str | None
    messages: tuple[Message, ...]
    answer: Message
    ids: Line
    prompt_tokens: int
    text: Passage
    finish: str
    complete: bool
    created_at: datetime
    lineage: str = field(default="", kw_only=True)
    settled: Settled | None = field(default=None, kw_only=True)
    cut: int = field(default=0, kw_only=True)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages of this turn alone: its input, then its answer."""
        return (*self.messages, self.answer)


@dataclass(frozen=True, eq=False)
class Turn(NewTurn):
    """A stored turn. stem: the turn above it whose ids and text its own go on from; None if they stand alone. root: the
    first turn above it, or itself.

    depth: turns above it. length: messages of the conversation up to its answer. chain: of that. sound: False if what
    is stored of it was altered: ids and text are empty then, and what was said is as far as it can be read.
    """

    stem: str | None
    root: str
    depth: int
    length: int
    chain: Chain
    sound: bool = True


def conversation(path: Sequence[NewTurn]) -> tuple[Message, ...]:
    """All messages of a path, root first."""
    return tuple(m for turn in path for m in turn.conversation)


def without(messages: Sequence[Message], cut: int) -> Sequence[Message]:
    """The messages but for the first `cut` after the system prompt."""
    head = system_prompt(messages)
    return (*messages[:head], *messages[head + cut :]) if cut else messages


def system_prompt(messages: Sequence[Message]) -> int:
    """How many messages at the beginning are the system prompt."""
    return next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))


def title_problem(title: str) -> str:
    """Why a text cannot be a session's title, to follow the word; "" if it can."""
    if len(title) > MAX_TITLE or not any(unicodedata.category(c)[0] not in "CMZ" and c not in _BLANK for c in title):
        return f"has 1 to {MAX_TITLE} characters, of which one can be seen"
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in title):
        return "has no control characters and no ends of lines"
    return ""


def check_id(kind: str, value: str) -> str:
    """The id itself. Raises StoreError unless it is one that cannot be mistaken for a path or a command."""
    if not isinstance(value, str) or not ID_PATTERN.fullmatch(value):
        raise StoreError(f"{kind} id {value!r} is not allowed: 1 to 64 letters, digits, _ or - are")
    return value
