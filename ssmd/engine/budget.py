"""The memory that loaded models and their answers may take: what fits into it, and who goes for another one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ssmd.engine.hosted import Hosted
from ssmd.machine import memory
from ssmd.machine.size import show_size

log = logging.getLogger(__name__)


class Budget:
    """Bytes of memory that models and answers may take together. nbytes: how many; None: nothing is known of the memory
    here, and everything fits.
    """

    def __init__(self, asked: int | None) -> None:
        """asked: bytes that somebody said; None: as many as the machine has free now, and a model whatever it takes."""
        self.nbytes = memory.available() if asked is None else asked
        self._strict = asked is not None

    def fits_answer(self, nbytes: int, loaded: Sequence[Hosted], coming: Sequence[Hosted]) -> bool:
        """Whether an answer may take so many bytes more. coming: those that wait to be loaded, whose memory is theirs.

        Where nobody said how many there are, an engine knows how many answers the machine has memory for.
        """
        wanted = nbytes + sum(one.nbytes for one in coming)
        if self._strict and self.nbytes is not None:
            return wanted + _held(loaded) <= self.nbytes
        free = memory.available() if coming else None
        return free is None or wanted <= free

    def for_model(self, wanted: Hosted, loaded: Sequence[Hosted]) -> int:
        """Bytes that there are for a model and those that are loaded, at this moment."""
        assert self.nbytes is not None
        free = None if self._strict else memory.available()
        if free is None:
            return self.nbytes
        nbytes = min(self.nbytes, free + _held(loaded))
        least = wanted.nbytes + sum(one.nbytes for one in loaded if one.pinned)
        if nbytes < least:
            sizes = show_size(wanted.nbytes), show_size(nbytes)
            log.warning("model %s takes about %s of memory, and %s are free", wanted.model.id, *sizes)
        return max(nbytes, least)


class NoRoom(Exception):
    """A model can never be loaded beside those that stay; the message says why."""


def make_room(wanted: Hosted, loaded: Sequence[Hosted], budget: int) -> list[Hosted]:
    """Those to let go so that there is room for one more, who answer nobody first, of these who were used last last.

    Whether there can be room is decided by files: what was seen depends on how many it answered, and a model that was
    loaded once would be refused for ever after. Raises NoRoom.
    """
    others = [one for one in loaded if one is not wanted]
    pinned = sum(one.least for one in others if one.pinned)
    if wanted.least + pinned > budget:
        beside = f", of which pinned models hold {show_size(pinned)}" if pinned else ""
        raise NoRoom(
            f"it takes about {show_size(wanted.least)} of memory, and models may take {show_size(budget)}{beside}; "
            "raise it with --memory-budget"
        )
    over = wanted.nbytes + sum(one.nbytes for one in others) - budget
    chosen: list[Hosted] = []
    for one in sorted(others, key=lambda one: (one.leases > 0, one.last_used or 0.0)):
        if over <= 0:
            break
        if not one.pinned:
            chosen.append(one)
            over -= one.nbytes
    return chosen


def in_the_way(wanted: Hosted, loaded: Sequence[Hosted], going: Sequence[Hosted], nbytes: int) -> list[str]:
    """The ids of those whose answers have to end first, all or some of them, when these go and the others stay."""
    stay = [one for one in loaded if one is not wanted and one not in going]
    busy = [one.model.id for one in going if one.leases]
    if wanted.nbytes + _held(stay) > nbytes:
        busy += [one.model.id for one in stay if one.busy_bytes]
    return busy


def _held(loaded: Sequence[Hosted]) -> int:
    return sum(one.nbytes + one.busy_bytes for one in loaded)
