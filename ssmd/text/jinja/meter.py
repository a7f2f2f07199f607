"""What one rendering of a chat template may use: CPU time, the size of a value, the sum of what it makes.

A template comes with a model from somewhere: Jinja's sandbox keeps it from escaping, this keeps it from eating the
machine. Sizes are in units of a character; an element of a container counts 8 besides its contents, as often as it is
referred to, so that whatever is printed or compared is as small as it was measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from jinja2.exceptions import SecurityError

CPU_LIMIT_S = 1.0
VALUE_LIMIT = 1 << 20
WORK_LIMIT = 1 << 28
MAX_BITS = 4096
MAX_DEPTH = 64
ELEMENT = 8
CHECK_EVERY = 16  # ticks between looks at the clock
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, dict, type({}.keys()), type({}.values()), type({}.items()))


class TooMuch(SecurityError):
    """A template wants more than it may have."""


class Meter:
    """One rendering's account. `given`: the characters of the messages, in proportion to which limits grow.

    written: the characters put out so far.
    """

    def __init__(self, given: int) -> None:
        self.written = 0
        self.limit = VALUE_LIMIT + 4 * given
        self._work_left = WORK_LIMIT + 64 * given
        self._deadline = time.thread_time() + CPU_LIMIT_S
        self._ticks = 0
        self._known: dict[int, tuple[Any, int]] = {}  # containers never change: the sandbox is an immutable one

    def tick(self) -> None:
        """Count a step. Raises TooMuch when the time is up."""
        self._ticks += 1
        if self._ticks % CHECK_EVERY == 0:
            self.check_time()

    def check_time(self) -> None:
        # CPU time of this thread, so that a busy machine refuses nothing.
        if time.thread_time() > self._deadline:
            raise TooMuch(f"the chat template runs for more than {CPU_LIMIT_S:g} s")

    def fits(self, size: int) -> None:
        """Check, before a value is made, that one of this size may be. Raises TooMuch."""
        if size > self.limit:
            raise TooMuch(f"the chat template makes a value of more than {self.limit} characters")

    def wrote(self, size: int) -> None:
        """Count what was put out. Raises TooMuch."""
        self.written += size
        self.fits(self.written)

    def made(self, value: Any) -> None:
        """Count a value that was made. Raises TooMuch if it, or the sum, is too large."""
        self.fits(self.size(value))
        new = len(value) if isinstance(value, str) else ELEMENT * len(value) if isinstance(value, _CONTAINERS) else 1
        self._work_left -= new
        if self._work_left < 0:
            raise TooMuch("the chat template makes too many values")
        if new > 10_000:
            self.check_time()
        self.tick()

    def size(self, value: Any, depth: int = 0) -> int:
        """The value's size if it were written out. Raises TooMuch as soon as it exceeds the limit."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise TooMuch(f"the chat template computes a number of more than {MAX_BITS} bits")
            return 1
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if depth > MAX_DEPTH:
            raise TooMuch(f"the chat template nests values more than {MAX_DEPTH} deep")
        parts: Iterable[Any] = value
        if isinstance(value, dict):
            parts = [*value.keys(), *value.values()]
        total = 0
        for part in parts:
            total += ELEMENT + self.size(part, depth + 1)
            self.fits(total)
        self._known[id(value)] = (value, total)
        return total
