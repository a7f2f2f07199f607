"""The shapes that commands require of a daemon's answers: a daemon of another version may answer differently."""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import Any

from ssmd.daemon import said

# A dict names fields, a list holds the shape of its rows, and a function returns True for a valid value.
Shape = type | UnionType | Callable[[Any], bool] | dict[str, "Shape"] | list["Shape"]
_LATEST = 1e11  # seconds since 1970: beyond all calendars


def fits(value: Any, shape: Shape) -> bool:
    """Return True if a value has all fields of a shape. It may have more."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(name in value and fits(value[name], one) for name, one in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if isinstance(shape, type | UnionType):
        return isinstance(value, shape)
    return shape(value)


def _is_time(value: Any) -> bool:
    seconds = said.number(value)
    return seconds is not None and 0 <= seconds < _LATEST


def _is_exchange(value: Any) -> bool:
    """Return True for a list of at least one message."""
    return fits(value, [{"role": str, "content": str}]) and bool(value)


_ID: Shape = {"id": str}
_LISTED: Shape = {"id": str, "model": str, "title": str, "turn_count": int, "last_used": _is_time}
_TURN: Shape = dict(id=str, parent=str | None, messages=_is_exchange, finish_reason=str, complete=bool)
_LOADED: Shape = {"id": str, "name": str, "state": str}
MODELS: Shape = {"data": [_ID]}
SESSIONS: Shape = {"data": [_LISTED], "has_more": bool}
SESSION: Shape = {"id": str, "model": str, "head": str, "turns": [_TURN]}
FORKED: Shape = _ID
WARM: Shape = {"id": str, "name": str, "tokens": int, "cached_tokens": int, "ready": bool}
LOADED: Shape = {"data": [_LOADED]}
UNLOADED: Shape = {"state": str, "queue": {"running": int}}
