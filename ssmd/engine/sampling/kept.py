"""The memory of a model's grammars: what all of them may take together, and which are kept for the next request.

A grammar takes memory while an answer waits or runs with it, and while it is kept. Most take less than 1 MB; one with
100,000 remainders takes 50. Copies of a guide share the grammar's memory.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ssmd.engine.terms import Grammar, Rejection
from ssmd.machine.size import show_size

if TYPE_CHECKING:
    from ssmd.engine.sampling.grammar import Guide

MOST_BYTES = 256_000_000  # of all grammars that are in use or kept
KEPT_BYTES = 64_000_000  # of those that are kept; the last one is kept even if it alone takes more
KEPT = 8  # grammars that are kept: each turn sends its tools and schemas again
LEAST_BYTES = 1_000_000  # counted for any grammar
RETRY_AFTER_S = 5


@dataclass(eq=False)
class GrammarMemory:
    """The memory of one grammar, as long as a guide of it lives. nbytes: as measured in its trial.

    copies: the guides of answers that wait or run.
    """

    nbytes: int
    copies: weakref.WeakSet[Guide] = field(default_factory=weakref.WeakSet)


class KeptGuides:
    """The guides of the grammars that were read last, and the count of all bytes. Its callers hold one lock."""

    def __init__(self) -> None:
        self._guides: OrderedDict[Grammar, Guide] = OrderedDict()  # last used last
        self._used: weakref.WeakSet[GrammarMemory] = weakref.WeakSet()  # of these and of the guides in use

    @property
    def used(self) -> int:
        """Return the bytes of all grammars that are in use or kept."""
        return sum(one.nbytes for one in self._used)

    def get(self, grammar: Grammar) -> Guide | None:
        """Return the guide of a grammar from its beginning on, None if it is not kept."""
        guide = self._guides.get(grammar)
        if guide is not None:
            self._guides.move_to_end(grammar)
        return guide

    def reserve(self, nbytes: int) -> GrammarMemory:
        """Count a grammar that is going to be read. Kept ones make room. Raises Rejection if those in use leave none.

        If no other is in use, it may take more than MOST_BYTES.
        """
        nbytes = max(LEAST_BYTES, nbytes)
        for grammar in [one for one, guide in self._guides.items() if not guide.memory.copies]:
            if self.used + nbytes <= MOST_BYTES:
                break
            del self._guides[grammar]
        if self._used and self.used + nbytes > MOST_BYTES:
            said = f"the grammars of other answers take {show_size(self.used)} of memory"
            raise Rejection(
                f"{said}, and this one {show_size(nbytes)}: too many requests. "
                f"Please try again in {RETRY_AFTER_S} seconds.",
                status=503,
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        memory = GrammarMemory(nbytes)
        self._used.add(memory)
        return memory

    def keep(self, grammar: Grammar, guide: Guide) -> None:
        """Keep the guide of a grammar, and drop those that were not used for longest."""
        self._guides[grammar] = guide
        self._guides.move_to_end(grammar)
        while len(self._guides) > 1 and (len(self._guides) > KEPT or self._kept_bytes > KEPT_BYTES):
            self._guides.popitem(last=False)

    @property
    def _kept_bytes(self) -> int:
        return sum(one.memory.nbytes for one in self._guides.values())
