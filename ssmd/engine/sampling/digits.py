"""A bound on the digits of JSON numbers. llguidance has none, so a small model may write digits until its tokens end.

The bound acts on masks, not on the grammar: a schema has no keyword that bounds a fraction or an exponent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WHOLE = 19  # digits before the point: those of the largest 64-bit integer
FRACTION = 17  # digits behind it: a 64-bit float has no more
SECONDS = 9  # digits of a fraction of a second: nanoseconds
EXPONENT = 2  # with these, all numbers are finite as 64-bit floats, and any JSON reader takes them
_NUMBER = re.compile(rb"(:[0-9]{2}:[0-9]{2}\.)?(\.|[eE][+-]?)?([0-9]+)\Z")  # (seconds, point or exponent, digits)
_NEAR = 12  # digits left from which on masks are looked at; hardly any token has more
_TAIL = 32  # bytes of the answer that are kept: a number's digits and what stands before them
_DIGITS = b"0123456789"
# First bytes of tokens that may follow a digit of a number, and one of a fraction of a second. In a string others may.
_BEHIND_NUMBERS = frozenset(b"0123456789.eE,}] \t\r\n")
_BEHIND_SECONDS = frozenset(b"0123456789Zz+-")
_CONTROL = 0xFF  # first byte of control tokens, and here of those that end an answer

Floats = NDArray[np.float32]


class DigitTable:
    """Facts about a model's tokens that bounding digits needs."""

    def __init__(self, tokens: Sequence[bytes], stop_tokens: Sequence[int]) -> None:
        """tokens: the bytes of each token [V]. stop_tokens: those that end an answer."""
        self.tokens = tokens
        first = np.frombuffer(b"".join([one[:1] or b"\xff" for one in tokens]), np.uint8).copy()  # (V,)
        first[list(stop_tokens)] = _CONTROL
        self.leading = np.zeros(len(tokens), np.int16)  # (V,) digits that a token begins with
        for token in np.flatnonzero(np.isin(first, [*_DIGITS])).tolist():
            self.leading[token] = len(tokens[token]) - len(tokens[token].lstrip(_DIGITS))
        self.behind_numbers = _members(_BEHIND_NUMBERS)[first]  # (V,)
        self.behind_seconds = _members(_BEHIND_SECONDS)[first]  # (V,)


class DigitBound:
    """Bounds the digits of the numbers in one answer."""

    def __init__(self, table: DigitTable, tail: bytes = b"") -> None:
        self._table, self._tail = table, tail

    def copy(self) -> DigitBound:
        """Copy it for another choice."""
        return DigitBound(self._table, self._tail)

    def take(self, tokens: Sequence[int]) -> None:
        """Note the next tokens of the answer."""
        self._tail = (self._tail + b"".join(map(self._table.tokens.__getitem__, tokens)))[-_TAIL:]

    def apply(self, mask: Floats) -> None:
        """Exclude tokens [V or more] with too many digits for the number that the answer ends in.

        Nothing is excluded within a string, or if a bound of the schema needs more digits.
        """
        found = _NUMBER.search(self._tail) if self._tail[-1:].isdigit() else None
        if found is None:
            return
        seconds, before, digits = found[1], found[2] or b"", found[3]
        most = SECONDS if seconds else WHOLE if not before else FRACTION if before == b"." else EXPONENT
        room = max(0, most - len(digits))
        if room >= _NEAR:
            return
        table = self._table
        mask = mask[: len(table.tokens)]  # (V,)
        allowed = mask == 0  # (V,)
        behind = table.behind_seconds if seconds else table.behind_numbers  # (V,)
        banned = allowed & (table.leading > room)  # (V,)
        if not (allowed & ~behind).any() and (allowed & ~banned).any():
            mask[banned] = -np.inf


def _members(firsts: frozenset[int]) -> NDArray[np.bool_]:
    """Return for each first byte if it is one of these, or that of a control token [256]."""
    return np.isin(np.arange(256), [*firsts, _CONTROL])
