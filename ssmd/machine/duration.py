"""Lengths of time as people write and read them."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h|d|)", re.ASCII)
MAX_S = 366 * 86400.0  # longest time; a longer one counts as for ever


def parse_duration(text: str) -> float:
    """Return the seconds of `5m`, `1h30m`, `90` or `0`; infinity for a negative time. Raises ValueError."""
    bare = text.strip().lower()
    if bare.startswith("-") and _seconds(bare[1:]) is not None:
        return math.inf
    seconds = _seconds(bare)
    if seconds is None:
        raise ValueError("expected seconds, or a time such as 30s, 5m or 1h30m; 0 is not at all, -1 is for ever")
    return seconds if seconds <= MAX_S else math.inf


def show_duration(seconds: float) -> str:
    """Write a length of time: `for ever`, `0s`, `5m`, `1h30m`."""
    if seconds == math.inf:
        return "for ever"
    whole, parts = round(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if whole >= size:
            parts.append(f"{whole // size}{unit}")
            whole %= size
    return "".join(parts) or f"{seconds:.3g}s"


def _seconds(text: str) -> float | None:
    found = _PART.findall(text)
    if not found or "".join(number + unit for number, unit in found) != text:
        return None
    if len(found) > 1 and any(not unit for _, unit in found):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in found)
