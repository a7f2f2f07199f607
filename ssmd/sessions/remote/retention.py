"""Retention of a remote: states that were not written or fetched for long go; the text of their turns stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssmd.sessions.remote.remote import TurnPlace


@dataclass(frozen=True)
class KeptState:
    """A state in a remote. idle_s: since it was written or fetched, by the remote's clock. nbytes: of its pack."""

    place: TurnPlace
    pack: str
    idle_s: float
    nbytes: int


@dataclass(frozen=True)
class Retention:
    """Limits on the states of a remote. idle_s: s without use after which one goes. nbytes: that all may take."""

    idle_s: float | None = None
    nbytes: int | None = None

    def leaving(self, states: Sequence[KeptState]) -> list[KeptState]:
        """Return the states that go, those first that were not used for longest."""
        left, found = sum(state.nbytes for state in states), list[KeptState]()
        for state in sorted(states, key=lambda one: one.idle_s, reverse=True):
            is_idle = self.idle_s is not None and state.idle_s > self.idle_s
            if not is_idle and (self.nbytes is None or left <= self.nbytes):
                break
            found.append(state)
            left -= state.nbytes
        return found


@dataclass
class RetentionCounts:
    """States that went, and those that stay, with the bytes of their packs."""

    states: int = 0
    nbytes: int = 0
    kept: int = 0
    kept_bytes: int = 0

    @staticmethod
    def of(states: Sequence[KeptState], leaving: Sequence[KeptState]) -> RetentionCounts:
        """Count states of which some leave."""
        nbytes = sum(one.nbytes for one in leaving)
        return RetentionCounts(
            len(leaving), nbytes, len(states) - len(leaving), sum(one.nbytes for one in states) - nbytes
        )
