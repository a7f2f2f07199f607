"""The arguments of a tool call: JSON in a text, as models and clients write it, or what a cut answer left of it."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

MAX_DEPTH = 48  # of what a template is given as an object; deeper ones it is given as the text that they are
_PARSED_DEPTH = 200  # that pydantic reads; the same for what it does not read
_LARGE = 1e300


def read_arguments(text: str) -> dict[str, Any] | None:
    """The object that arguments are, which templates expect; None if they are none. Nothing at all is no arguments."""
    value = _parsed(text)
    return value if isinstance(value, dict) and _is_plain(value, MAX_DEPTH) else None


def canonical(text: str) -> str:
    """Write arguments in the one form of all that say the same: spaces, the order of names and escapes do not count,
    and numbers are equal where they are the same double, as RFC 8785 and JavaScript have them.
    """
    value = _parsed(text)
    with suppress(ValueError, RecursionError):  # too deep: it stands as it is
        if value is None and "\\u" in text:  # halves of surrogate pairs, which JavaScript keeps
            value = json.loads(text, parse_constant=_refused)
        if value is not None:
            return json.dumps(_of_doubles(value, _PARSED_DEPTH), sort_keys=True, separators=(",", ":"))
    return text


def _of_doubles(value: Any, depth: int) -> Any:
    """A JSON value with its numbers as doubles, whole ones as integers. One that no double can hold becomes null.

    Raises ValueError if it is nested deeper than `depth`.
    """
    if isinstance(value, dict | list) and not depth:
        raise ValueError("too deep")
    if isinstance(value, dict):
        return {name: _of_doubles(part, depth - 1) for name, part in value.items()}
    if isinstance(value, list):
        return [_of_doubles(part, depth - 1) for part in value]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    try:
        double = float(value)
    except OverflowError:
        return None
    if not math.isfinite(double):
        return None
    return int(double) if double.is_integer() else double


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _parsed(text: str) -> Any:
    """What JSON says; None of what is none, has halves of surrogate pairs in it, or is null."""
    if not text.strip():
        return {}
    try:
        return from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):
        return None


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a template can write it as JSON again: numbers of common sizes, nested at most so deep."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)
    return not isinstance(value, int | float) or abs(value) < _LARGE
