"""A reply: the answer that a request got, kept with its turn so that the request can be repeated without a new turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True)
class ReplyKey:
    """The key by which a repeated request is recognised."""

    digest: bytes  # 32 bytes; the name of the owner is part of it
    body: bytes  # 32 bytes, a hash of the request's body
    lasts: timedelta  # how long the reply is kept
    named: bool  # the client named the request, so one reply has this key; else equal requests share it
    replaces: tuple[str, ...] = ()  # turns of an attempt that broke off, which this one replaces


@dataclass(frozen=True)
class NewReply:
    """A reply to be stored, without the text of its turns. complete: False if it broke off. answer: JSON.

    facts: JSON that is kept as long as the reply's only turn.
    """

    key: ReplyKey
    complete: bool
    answer: Mapping[str, Any]
    facts: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reply:
    """A stored reply. turns: their ids, one a choice. texts: the choices' answers, whole messages."""

    body: bytes
    session: str
    turns: tuple[str, ...]
    texts: tuple[str, ...]
    complete: bool
    answer: Mapping[str, Any]
