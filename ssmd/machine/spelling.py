"""The name that somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable

_ALIKE = 0.6
_MAX_CHARACTERS = 200


def nearest(word: str, names: Iterable[str]) -> str:
    """The name that a word resembles most, or "" if it resembles none."""
    from difflib import get_close_matches

    by_letters = {name.lower(): name for name in sorted(names, reverse=True)}
    if len(word) > _MAX_CHARACTERS or not by_letters:
        return ""
    return next((by_letters[one] for one in get_close_matches(word.lower(), by_letters, n=1, cutoff=_ALIKE)), "")


def meant(word: str, names: Iterable[str]) -> str:
    """A question to put into an error's message, with a space behind; or ""."""
    name = nearest(word, names)
    return f"did you mean {name}? " if name else ""
