"""Stop strings in a stream of text: text is held back while a stop string could begin in it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """A filter that cuts a stream before the first complete stop string; the longest of those complete at once.

    Each stop string has a Knuth-Morris-Pratt automaton: O(characters x stop strings) in all.
    Raises ValueError on an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string cannot be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""
        self.found: str | None = None  # the stop string that was hit

    def push(self, text: str) -> tuple[str, bool]:
        """Take in text. Returns (the text to send now, True if a stop string was hit).

        The stop string and the text after it are dropped.
        """
        if self.found is not None:
            return "", True
        if not self._stops:
            return text, False
        whole = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            longest = ""
            for i, stop in enumerate(self._stops):
                n = self._matched[i]
                while n and stop[n] != char:
                    n = self._borders[i][n - 1]
                n += stop[n] == char
                self._matched[i] = n
                if n == len(stop):
                    longest = max(longest, stop, key=len)
            if longest:
                self.found, self._held = longest, ""
                return whole[: at - len(longest)], True
        sent = len(whole) - max(self._matched)
        self._held = whole[sent:]
        return whole[:sent], False

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the stream."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = borders[n - 1]
        n += stop[i] == stop[n]
        borders[i] = n
    return borders
