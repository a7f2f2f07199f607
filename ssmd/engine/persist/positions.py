"""Positions at which states of a prompt are kept, beside the ends of its system prompt, of itself and of its answer.

A later prompt may part from this one anywhere, and a recurrent state cannot be cut back. So some states are kept inside
a prompt: at the end of its tools and of its first system messages; at the point where it parts from an earlier one, as
a third one may part there too; and on a widening grid. All these positions are multiples of the program's grid, where
prefill stops in any case: no result depends on them.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from ssmd.sessions.line import Line, anchors

FIRST = 1024  # tokens at which the widening grid begins for a recurrent state, which is stored whole each time
NEAR = 256  # a position so few tokens before another one is left out
MOST_SEEN = 1 << 15  # grid cells of earlier prompts that are remembered, some 100 bytes each
_HASHED = 16  # bytes of a hash that are remembered


class SeenPrompts:
    """The beginnings of earlier prompts, as hashes at the grid's positions. Thread-safe; the oldest are forgotten.

    Owners see only their own: no client learns what another one asked.
    """

    def __init__(self, cell: int, most: int = MOST_SEEN) -> None:
        """cell: tokens of the program's grid."""
        self._cell, self._most = cell, most
        # By owner and hash: the length of the last prompt that had this cell, and the hash of all its ids.
        self._seen: OrderedDict[tuple[str, bytes], tuple[int, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def parted(self, owner: str, ids: Line) -> tuple[int, bool]:
        """Return how many tokens a prompt shares with an earlier one, rounded down to the grid. Then remember it.

        0 if it shares none of those at hand. The second value is True if both go on there, with other tokens. It is
        False if that is not known, as the prompt is shorter than the earlier one and ends within a cell.
        """
        cell = self._cell
        positions = range(-(-max(ids.start, 1) // cell) * cell, len(ids), cell)
        names = [(owner, hashed[:_HASHED]) for hashed in ids.hashes(positions)]
        whole = len(ids), _named(ids, len(ids))
        with self._lock:
            at = next((i for i in reversed(range(len(names))) if names[i] in self._seen), None)
            earlier = None if at is None else self._seen[names[at]]
            for name in names:
                self._seen[name] = whole
                self._seen.move_to_end(name)
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)
        if at is None or earlier is None:
            return 0, False
        length, end = earlier
        if ids.start <= length <= len(ids):
            return positions[at], _named(ids, length) != end
        return positions[at], at + 1 < len(names)


def _named(ids: Line, length: int) -> bytes:
    """Hash the first ids. `Line.hash` has the last ones as they are."""
    return hashlib.blake2b(ids.hash(length), digest_size=_HASHED).digest()


def inside(
    first: int, last: int, wanted: Sequence[int], cell: int, *, recurrent: bool, ends: Sequence[int] = ()
) -> list[int]:
    """List the positions between `first` and `last` at which states are kept, ascending.

    first: position of the state that the prompt starts from. last: that of its last token. wanted: positions that
    other prompts are likely to share; they are rounded down to the grid. ends: where states are kept in any case.
    recurrent: a state is stored whole. Otherwise it is only rows of caches, each of which is stored once: then the
    positions lie so close that a later prompt reads at most an eighth of what it shares.
    """
    if recurrent:
        grid = [FIRST << n for n in range(max(0, last.bit_length() - FIRST.bit_length() + 1))]
    else:
        grid = [p for p in anchors(cell, last) if not p % cell]
    chosen = {p - p % cell for p in wanted}
    near = NEAR if recurrent else 0
    found = {p for p in grid if not any(p <= other < p + near for other in (*ends, *chosen))}
    return sorted(p for p in found | chosen if first < p < last and p not in ends)
