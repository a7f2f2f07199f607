"""The tray's view as plain values: the icon's state, texts, numbers and rows.

Texts from a daemon are one line of a limited length.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ssmd_tray.history import Point

LONGEST = 160  # characters of a text
MOST_ROWS = 50


class Icon(StrEnum):
    """The icon's state. AWAY: no daemon answers. LOADING: a model is being loaded, or the daemon starts or ends."""

    IDLE = "idle"
    GENERATING = "generating"
    LOADING = "loading"
    DEGRADED = "degraded"
    AWAY = "away"


@dataclass(frozen=True)
class Quantity:
    """A measured quantity: texts of its numbers, its line, the most of that, and all of it as a sentence."""

    last: str
    p50: str
    p95: str
    points: tuple[Point, ...]
    most: str
    spoken: str


@dataclass(frozen=True)
class Request:
    """A request in progress. id: None if it belongs to another caller, which alone may stop it."""

    id: str | None
    model: str
    doing: str
    spoken: str


@dataclass(frozen=True)
class Model:
    """An installed model. doing: its state in words."""

    id: str
    doing: str
    memory: str
    loaded: bool
    busy: bool  # it is loaded or let go just now
    pinned: bool
    spoken: str


@dataclass(frozen=True)
class View:
    """The whole view. notice: a problem, or "". Numbers are None while the daemon is away.

    base_url: the address for clients; if it is None, why_no_url is the reason. runs: a process uses the data directory.
    answers: the daemon answers requests.
    """

    icon: Icon
    headline: str
    daemon: str
    notice: str
    tooltip: str
    ttft: Quantity
    tbt: Quantity
    rate: str
    cached: str
    stored: str
    stored_share: float | None
    requests: tuple[Request, ...]
    more_requests: int
    models: tuple[Model, ...]
    more_models: int
    base_url: str | None
    why_no_url: str
    runs: bool
    answers: bool


def plain(text: str, most: int = LONGEST) -> str:
    """Return a text fit for display: one line without control or direction characters, at most `most` characters."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "\ufffd" for c in cut)
