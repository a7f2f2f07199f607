"""Suggestions for misspelt names."""

from __future__ import annotations

import json
from collections.abc import Iterable

LIKENESS = 0.7  # least likeness of two names, from 0 to 1 (difflib): `prot` and `port` have 0.75, `port` and `host` 0.5
_OF_A_MODEL = 0.6  # least likeness of two models' names
MOST_CHARS = 64  # characters of a name that are compared and shown: it may be any text


def nearest(word: str, names: Iterable[str], likeness: float = _OF_A_MODEL) -> str:
    """Return the name that a word resembles most; "" if it resembles none."""
    from difflib import get_close_matches

    by_plain = {_plain(name): name for name in sorted(names, reverse=True)}
    found = get_close_matches(_plain(word[:MOST_CHARS]), by_plain, 1, likeness)
    return by_plain[found[0]] if found else ""


def by_likeness(word: str, names: Iterable[str]) -> list[str]:
    """Sort names by their likeness to a word, the most similar first."""
    from difflib import SequenceMatcher

    likeness = {name: SequenceMatcher(None, _plain(name), _plain(word[:MOST_CHARS])).ratio() for name in names}
    return sorted(likeness, key=lambda name: (-likeness[name], name))


def meant(word: str, names: Iterable[str]) -> str:
    """Return a question for an error's message, "did you mean NAME? ", or ""."""
    name = nearest(word, names)
    return f"did you mean {name}? " if name else ""


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question to add to an error, "; did you mean port?"; "" if no known name is similar.

    prefix: the common beginning of all names. `name` and `known` are given without it, as it would make them similar.
    """
    found = nearest(name, known, LIKENESS)
    return f"; did you mean {prefix}{found}?" if found else ""


def printable(name: str, most: int = MOST_CHARS) -> str:
    """Return an untrusted name fit for a line: at most `most` characters, with unprintable ones escaped."""
    cut = name if len(name) <= most else name[:most] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in cut)


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as readable JSON, with control and bidirectional characters escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)  # outside of strings only line ends are unprintable
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
