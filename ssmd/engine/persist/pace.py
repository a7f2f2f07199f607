"""The measured speed of writing states. The writer and the policy of what to keep read it."""

from __future__ import annotations

import time

KNOWN_S = 60.0  # s after which a measured write says nothing any more
SMALL_BYTES = 1 << 20  # bytes of recurrent data below which a state is always worth its write
WORTH = 4  # least ratio of the time a state saves to its write time: most prompts are not repeated
UNKNOWN_MS = 4.0  # ms per MiB, assumed before a state was written


class Pace:
    """The recent speed at which states become durable."""

    def __init__(self) -> None:
        self._last = (0.0, 0)  # seconds, bytes
        self._when = 0.0

    def wait_s(self, nbytes: int) -> float:
        """Estimate the seconds that a write of `nbytes` takes; 0.0 without a write in the last KNOWN_S."""
        if time.monotonic() - self._when > KNOWN_S or not nbytes:
            return 0.0
        took_s, of = self._last
        return took_s * max(1.0, nbytes / of) if of > SMALL_BYTES else took_s

    def cost_ms(self, nbytes: int) -> float:
        """Estimate the milliseconds that a large state of `nbytes` takes from all other work."""
        took_s, of = self._last
        return nbytes * (took_s * 1e3 / of if of > SMALL_BYTES else UNKNOWN_MS / (1 << 20))

    def pays(self, nbytes: int, read_ms: float) -> bool:
        """Return True if writing a state of `nbytes` is worth it. read_ms: prefill time that it saves."""
        return nbytes < SMALL_BYTES or read_ms >= WORTH * self.cost_ms(nbytes)

    def note(self, nbytes: int, took_s: float) -> None:
        """Note the time of a write of `nbytes`, or the time that it was given."""
        if nbytes:
            self._when, self._last = time.monotonic(), (took_s, nbytes)
