"""The arguments of a tool call: JSON text as models and clients write it, perhaps cut off with its answer."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

MAX_DEPTH = 48  # nesting of arguments that a template gets as an object; deeper ones it gets as their text
_PARSED_DEPTH = 200  # nesting that pydantic reads; the same bound where json reads instead
_LARGE = 1e300  # numbers below it can be written as JSON again


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments as an object, as templates expect them; None if they are not one. Blank text gives {}."""
    value = _parsed(text)
    return value if isinstance(value, dict) and _is_plain(value, MAX_DEPTH) else None


def arguments_so_far(text: str) -> dict[str, Any]:
    """Return arguments as an object: as far as they came, if the answer was cut off in them."""
    found = read_arguments(text)
    if found is None:
        try:
            found = from_json(text, allow_partial="trailing-strings")
        except ValueError:
            found = None
    return found if isinstance(found, dict) else {}


def canonical(text: str) -> str:
    """Return arguments in a canonical form, so that equal ones compare equal.

    Spaces, the order of names and escapes do not count. Numbers are equal if they are the same double, as in RFC 8785
    and JavaScript. Text that is not JSON, or nests too deep, is returned unchanged.
    """
    value = _parsed(text)
    with suppress(ValueError, RecursionError):  # too deep: it stands as it is
        if value is None and "\\u" in text:  # halves of surrogate pairs, which JavaScript keeps
            value = json.loads(text, parse_constant=_refused)
        if value is not None:
            return json.dumps(_of_doubles(value, _PARSED_DEPTH), sort_keys=True, separators=(",", ":"))
    return text


def _of_doubles(value: Any, depth: int) -> Any:
    """Return a JSON value with its numbers rounded to doubles, whole ones as integers.

    A number beyond the range of doubles becomes null. Raises ValueError if it is nested deeper than `depth`.
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
    """Return the value of a JSON text; None if it is not JSON, holds half of a surrogate pair, or is null."""
    if not text.strip():
        return {}
    try:
        return from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):
        return None


def _is_plain(value: Any, depth: int) -> bool:
    """Return True if a template can write the value as JSON again: numbers below _LARGE, nesting up to `depth`."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)
    return not isinstance(value, int | float) or abs(value) < _LARGE
