"""Readers of a daemon's status fields that trust nothing: a field that is missing or invalid counts as unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssmd.machine.size import show_size

UNKNOWN = "-"
_MOST = 1e18


def each(found: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the rows of a list."""
    value = found.get(key)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def of(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the fields of an object within another."""
    value = found.get(key)
    return value if isinstance(value, dict) else {}


def text(found: Mapping[str, Any], key: str) -> str:
    """Return a text, or ""."""
    value = found.get(key)
    return value if isinstance(value, str) else ""


def number(value: Any) -> float | None:
    """Return a value if it is a number below _MOST in size; else None, also for NaN and booleans."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_one and abs(value) < _MOST else None  # NaN is not


def size(value: Any) -> str:
    """Format a number of bytes for people."""
    nbytes = number(value)
    return UNKNOWN if nbytes is None else show_size(int(nbytes))


def ago(seconds: float) -> str:
    """Format a time in one unit: `40 s`, `5 min`, `3 h`, `2 d`."""
    seconds = max(0.0, seconds)
    for unit, length, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < most * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def until(model: Mapping[str, Any], now: float) -> str:
    """Return how long a model stays loaded, as text. now: seconds since 1970."""
    if model.get("state") != "loaded":
        return UNKNOWN
    if model.get("pinned") is True:
        return "pinned"
    queue = of(model, "queue")
    if queue.get("running") or queue.get("waiting"):
        return "in use"
    end = number(model.get("idle_until"))
    return "for ever" if end is None else f"in {ago(end - now)}"


def phase(request: Mapping[str, Any]) -> str:
    """Return the phase of a request, with the progress of its prefill."""
    name = text(request, "phase") or UNKNOWN
    fed, to_feed = number(request.get("fed")), number(request.get("to_feed"))
    if name == "prefill" and fed is not None and to_feed:
        return f"prefill {fed:.0f}/{to_feed:.0f}"
    return name
