"""Markers in a stream of text: the first one, and the end of a text that may become one."""

from __future__ import annotations

from collections.abc import Collection


def first(text: str, markers: Collection[str]) -> tuple[int, str]:
    """Return (position, marker) of the first of these markers in a text; (its length, "") if it has none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(len(text), ""))


def may_become(text: str, markers: Collection[str]) -> int:
    """Count the characters at a text's end that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-n:]) for marker in markers):
            return n
    return 0
