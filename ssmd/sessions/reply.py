"""A reply: the answer that a request got, kept with its turn so that the request can be repeated without a new turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True)
class ReplyKey:
    """The key by which a request is recognised when it comes again.

    digest: 32 bytes; who may have it is part of it. body: 32 bytes, a hash of the request's body. lasts: how long the
    reply is kept. named: the client named the request itself, so that there is one reply under this key; else requests
    that are alike share it. replaces: the turns of an attempt that broke off, which this one takes the place of.
    """

    digest: bytes
    body: bytes
    lasts: timedelta
    named: bool
    replaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class NewReply:
    """What is kept of a reply beside the text of its turns. complete: False if it broke off. answer: JSON."""

    key: ReplyKey
    complete: bool
    answer: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """A stored reply. turns: their ids, one a choice. texts: the choices' answers, whole messages."""

    body: bytes
    session: str
    turns: tuple[str, ...]
    texts: tuple[str, ...]
    complete: bool
    answer: Mapping[str, Any]
