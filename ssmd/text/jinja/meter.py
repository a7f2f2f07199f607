"""Limits of one rendering of a chat template: CPU time, the size of each value, and of all values together.

A template comes with an untrusted model. Jinja's sandbox keeps it from escaping; the limits keep it from exhausting
the machine. Sizes are in characters. Each element of a container counts 8 besides its contents, as often as it is
referred to. So no printed or compared value is larger than its measured size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from jinja2.exceptions import SecurityError

CPU_LIMIT_S = 1.0  # CPU time of a rendering of few messages
MESSAGES_A_SECOND = 2500  # messages per second of CPU time; on a slow core the slowest template in use renders 30,000
LONGEST_S = 10.0  # CPU time of a rendering of any number of messages
VALUE_LIMIT = 1 << 20  # size of one value, beside 4 for each given character
WORK_LIMIT = 1 << 28  # size of all values together, beside 64 for each given character
MAX_BITS = 4096  # bits of a number
MAX_DEPTH = 64  # nesting of a value
ELEMENT = 8  # size of a container's element, beside its contents
CHECK_EVERY = 16  # ticks between checks of the clock
LOOK_EVERY_S = 0.001  # shortest time between reads of the thread's CPU clock
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, dict, type({}.keys()), type({}.values()), type({}.items()))


class LimitError(SecurityError):
    """A template that exceeds a limit."""


class Meter:
    """The usage and limits of one rendering. Sizes grow with the given characters, CPU time with the messages.

    written: characters put out so far.
    """

    def __init__(self, given: int, messages: int = 1) -> None:
        self.written = 0
        self._seconds = min(max(CPU_LIMIT_S, messages / MESSAGES_A_SECOND), LONGEST_S)
        self.limit = VALUE_LIMIT + 4 * given
        self._work_left = WORK_LIMIT + 64 * given
        self._deadline = time.thread_time() + self._seconds
        self._look = time.perf_counter() + self._seconds  # before then the thread cannot have used up its CPU time
        self._ticks = 0
        self._known: dict[int, tuple[Any, int]] = {}  # sizes of containers, which the immutable sandbox never changes

    # Called by compiled templates, as `meter_tick` and `meter_made`.

    def tick(self) -> bool:
        """Count a step, such as a turn of a loop or a call of a macro. Raises LimitError when the time is up."""
        self._ticks += 1
        if self._ticks % CHECK_EVERY == 0:
            self.check_time()
        return True

    def made(self, value: Any) -> Any:
        """Count a value that was made or is printed, and return it. Raises LimitError if it or the sum is too large."""
        kind = type(value)
        if kind is bool:
            new = 1
        elif kind is str:
            new = len(value)
            if new > self.limit:
                self.fits(new)
        else:
            self.fits(self.size(value))
            new = ELEMENT * len(value) if isinstance(value, _CONTAINERS) else 1
            if isinstance(value, str):
                new = len(value)
        self._work_left -= new
        if self._work_left < 0:
            raise LimitError("the chat template makes too many values")
        self._ticks += 1
        if new > 10_000 or self._ticks % CHECK_EVERY == 0:
            self.check_time()
        return value

    def check_time(self) -> None:
        # The limit is the thread's CPU time, so a busy machine does not refuse a template. Reading that clock takes
        # five times as long as the wall clock.
        if time.perf_counter() < self._look:
            return
        left = self._deadline - time.thread_time()
        self._look = time.perf_counter() + max(left, LOOK_EVERY_S)
        if left < 0:
            raise LimitError(f"the chat template runs for more than {self._seconds:g} s")

    def fits(self, size: int) -> None:
        """Check the size of a value before it is made. Raises LimitError."""
        if size > self.limit:
            raise LimitError(f"the chat template makes a value of more than {self.limit} characters")

    def wrote(self, size: int) -> None:
        """Count characters that were put out. Raises LimitError."""
        self.written += size
        self.fits(self.written)

    def size(self, value: Any, depth: int = 0) -> int:
        """Return the value's size if it were written out. Raises LimitError as soon as it exceeds the limit."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise LimitError(f"the chat template computes a number of more than {MAX_BITS} bits")
            return 1
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if depth > MAX_DEPTH:
            raise LimitError(f"the chat template nests values more than {MAX_DEPTH} deep")
        parts: Iterable[Any] = value
        if isinstance(value, dict):
            parts = [*value.keys(), *value.values()]
        total = 0
        for part in parts:
            total += ELEMENT + self.size(part, depth + 1)
            self.fits(total)
        self._known[id(value)] = (value, total)
        return total
