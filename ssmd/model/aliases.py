"""Aliases: other names of installed models, for clients that ask for a fixed one. In names `*` stands for any text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ssmd.machine.spelling import printable

MOST = 256  # most aliases; each request for a name that is not installed is compared with all of them
MOST_STARS = 8  # most stars in a pattern
_PATTERN = re.compile(r"[!-+\--<>-~]{1,128}")  # printable ASCII without space, comma and equals sign
_MODEL = re.compile(r"[!-)+\--<>-~]{1,128}")  # the same without a star
ANY = "*"


@dataclass(frozen=True)
class Alias:
    """A name that requests may use, or a pattern of names, and the installed model that answers.

    model: a model's name, or `name@runtime`. It is never the name of another alias.
    """

    pattern: str
    model: str

    @property
    def is_exact(self) -> bool:
        """Return True if the pattern is a single name."""
        return ANY not in self.pattern

    @cached_property
    def _first(self) -> str:
        return self._parts[0]

    @cached_property
    def _parts(self) -> list[str]:
        return self.pattern.split(ANY)

    def fits(self, name: str) -> bool:
        """Return True if a name fits the pattern. Takes time in proportion to the name's length, whatever the stars."""
        if not name.startswith(self._first):  # as of nearly every alias
            return False
        first, *between = self._parts
        if not between:
            return name == first
        last = between.pop()
        at, end = len(first), len(name) - len(last)
        if at > end or not name.endswith(last):
            return False
        for part in between:
            at = name.find(part, at, end)
            if at < 0:
                return False
            at += len(part)
        return True

    def __str__(self) -> str:
        """Return it as the setting has it."""
        return f"{self.pattern}={self.model}"


def parse(texts: Iterable[str]) -> tuple[Alias, ...]:
    """Return the aliases of NAME=MODEL texts, in their order. Raises ValueError that quotes the wrong one."""
    found: list[Alias] = []
    for text in texts:
        name, equals, model = (part.strip() for part in text.partition("="))
        shown = printable(text)
        if not equals or not name or not model:
            raise ValueError(f"{shown!r} is not NAME=MODEL, such as claude-*=smollm2")
        if not _PATTERN.fullmatch(name):
            raise ValueError(f"{shown!r}: a name has 1 to 128 printable ASCII characters, without spaces, ',' and '='")
        if not _MODEL.fullmatch(model):
            raise ValueError(f"{shown!r}: behind '=' stands the name of one installed model, such as smollm2")
        alias = Alias(name, model)
        if name.count(ANY) > MOST_STARS:
            raise ValueError(f"{shown!r} has more than {MOST_STARS} stars")
        if name == model:
            raise ValueError(f"{shown!r} is an alias for itself; leave it out, or name another model")
        before = next((one for one in found if one.pattern in (ANY, name)), None)
        if before is not None:
            raise ValueError(f"{shown!r} would never be used: '{before}' comes first and fits the same names")
        found.append(alias)
    if len(found) > MOST:
        raise ValueError(f"there are {len(found)} aliases; at most {MOST} are allowed, and a pattern can join several")
    return tuple(found)
