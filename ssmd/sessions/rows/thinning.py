"""Thinning: which checkpoints of a session go first, and what that frees. Decided here, done in retention.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ssmd.sessions.rows.holding import Held, Holding

NEWEST = 2  # turns at the end of every path that keep all their checkpoints


def ages(parents: Mapping[str, str | None], ends: Collection[str] = ()) -> dict[str, int]:
    """Count, for each turn, the turns of the shortest path below it. parents: in the order of writing.

    ends: turns at which a conversation ends though others follow: those that forks begin at.
    """
    found: dict[str, int] = dict.fromkeys(ends, 0)
    for one in reversed(list(parents)):
        age = found.setdefault(one, 0)
        above = parents[one]
        if above is not None:
            found[above] = min(age + 1, found.get(above, age + 1))
    return found


def kept_when_thin(age: int, depth: int) -> bool:
    """Whether a turn `age` turns above the end and `depth` turns below the beginning keeps a checkpoint.

    Ever sparser ones do: of those 2 and 3 turns back every second, of those 4 to 7 back every fourth, and so on. So
    n turns keep some log2(n) checkpoints, and to edit a message k turns back at most some 2 k turns are read again.
    What is kept depends on the depth, so that it stays the right set when the conversation goes on.
    """
    return age < NEWEST or depth % (1 << (age.bit_length() - 1)) == 0


def thinned(holding: Holding) -> list[Held]:
    """The checkpoints that a thinned session does without, the oldest first."""
    old = ages(holding.parents, holding.bases)
    deepest = _deepest(holding)

    def stays(held: Held) -> bool:
        if held.kind == "system" or old[held.turn] < NEWEST:
            return True
        # Of an old turn its end is enough: from there both its successors' messages can be edited.
        return held.position == deepest[held.turn] and kept_when_thin(old[held.turn], holding.depths[held.turn])

    gone = [held for held in holding.checkpoints if not stays(held)]
    return sorted(gone, key=lambda h: (-old[h.turn], h.position))


def leaving(holding: Holding) -> list[Held]:
    """All checkpoints in the order in which an emptied session gives them up: the likeliest to be resumed come last.

    Those are the ends of its current path and of what its forks began with.
    """
    ends = {holding.head, *holding.bases}
    current: set[str] = set()
    for end in ends:
        at: str | None = end
        while at is not None and at in holding.parents and at not in current:
            current.add(at)
            at = holding.parents[at]
    deepest = _deepest(holding)

    def worth(held: Held) -> tuple[bool, bool, int]:
        return held.turn in current, held.turn in ends and held.position == deepest[held.turn], held.position

    return sorted(holding.checkpoints, key=worth)


def _deepest(holding: Holding) -> dict[str, int]:
    """The position of the last checkpoint that was made for each turn."""
    found: dict[str, int] = {}
    for held in holding.checkpoints:
        found[held.turn] = max(held.position, found.get(held.turn, 0))
    return found


class Ledger:
    """Adds up what letting go of some of a session's checkpoints frees."""

    def __init__(self, holding: Holding) -> None:
        self._nbytes = {number: s.nbytes for number, s in holding.segments.items()}
        self._users = {number: s.users for number, s in holding.segments.items()}
        self.gone: list[Held] = []
        self.loose: list[int] = []  # segments that no checkpoint lists any more
        self.freed = 0

    def gain(self, held: Held) -> int:
        """Bytes that letting go of a checkpoint frees: none if others share it, nor those of segments others list."""
        if held.shared:
            return 0
        return held.nbytes + sum(self._nbytes[s] for s in held.segments if self._users[s] == 1)

    def let_go(self, held: Held) -> None:
        self.freed += self.gain(held)
        self.gone.append(held)
        if not held.shared:
            self.loose += [s for s in held.segments if self._users[s] == 1]
            for s in held.segments:
                self._users[s] -= 1

    def thin(self, holding: Holding, needed: int, keep: Collection[int]) -> bool:
        """Let go of old checkpoints until `needed` bytes are free. False: there are no more, and not enough is free."""
        for held in thinned(holding):
            if self.freed >= needed:
                return True
            if held.id not in keep and not held.pinned and self.gain(held):
                self.let_go(held)
        return self.freed >= needed

    def empty(self, holding: Holding, needed: int, keep: Collection[int]) -> bool:
        """Let go of all, until `needed` bytes are free. False: nothing is left but `keep`, and not enough is free."""
        left = [held for held in leaving(holding) if held.id not in keep and not held.pinned]
        while self.freed < needed:
            # A middle whose rows the next one lists frees nothing now: the end of the chain goes before it.
            best = next((held for held in left if self.gain(held)), None)
            if best is None:
                for held in left:
                    self.let_go(held)
                return False
            left.remove(best)
            self.let_go(best)
        return True
