"""States computed anew from a session's text, for a file whose own are not to be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ssmd.model.state import State
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Handle, Program
from ssmd.sessions.checkpoint import Ids, NewCheckpoint, Scope
from ssmd.sessions.files.contents import Mark
from ssmd.sessions.rows.encoded import Encoded, encode
from ssmd.sessions.rows.turns import shared_ids
from ssmd.sessions.turn import NewTurn
from ssmd.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rereader:
    """A loaded model that reads sessions of its lineage. progress: called with the tokens read so far, and of how many.

    scope: as the engine's for this program.
    """

    program: Program
    tokenizer: Tokenizer
    scope: Scope
    progress: Callable[[int, int], None] = lambda read, of: None

    def spells(self, turn: NewTurn) -> bool:
        """Whether the turn's ids stand for its text and nothing else."""
        return self.tokenizer.spells(turn.ids.tolist(), turn.text)

    def compute(self, turns: Mapping[str, NewTurn], marks: Iterable[Mark]) -> list[Encoded]:
        """Checkpoints at `marks`, parents first, of no origin: they are this program's own.

        A mark that is not within its turn's ids, or beyond the program's context, is passed over. Branches are read
        from the start. Raises what the program raises.
        """
        wanted: dict[bytes, tuple[Mark, Ids]] = {}
        most = self.program.context
        for mark in marks:
            ids = turns[mark.turn].ids[: max(0, mark.position)]
            if 0 < mark.position == len(ids) and (most is None or len(ids) <= most):
                wanted.setdefault(ids.astype(">i4").tobytes(), (mark, ids))
        in_order = [wanted[key] for key in sorted(wanted)]  # what begins alike comes together, the shorter one first
        return self._read(in_order)

    def _read(self, wanted: list[tuple[Mark, Ids]]) -> list[Encoded]:
        whole = _tokens_to_read([ids for _, ids in wanted])
        done: list[Encoded] = []
        handle: Handle = None
        fed, read = np.empty(0, np.int32), 0
        parent: NewCheckpoint | None = None
        try:
            for mark, ids in wanted:
                if handle is None or shared_ids(fed, ids) < len(fed):
                    self.program.release(handle) if handle is not None else None
                    handle, fed, parent = self.program.new_state(), fed[:0], None
                at = len(fed)
                for n in buckets.plan(len(ids) - at, self.program.buckets):
                    self.program.prefill(handle, ids[at : at + n].tolist())
                    at, read = at + n, read + n
                    self.progress(read, whole)
                fed = ids
                state = self.program.save(handle, since=parent.state.position if parent else 0)
                checkpoint = NewCheckpoint(mark.kind, ids, state, parent, turn=mark.turn)
                done.append(
                    encode(checkpoint, scope=self.scope, producer=self.program.producer, spec=self.program.spec)
                )
                parent = replace(checkpoint, state=State(state.position, state.since, {}), parent=None)
        finally:
            if handle is not None:
                self.program.release(handle)
        return done


def _tokens_to_read(in_order: list[Ids]) -> int:
    total, above = 0, np.empty(0, np.int32)
    for ids in in_order:
        goes_on = shared_ids(above, ids) == len(above)
        total += len(ids) - (len(above) if goes_on else 0)
        above = ids
    return total
