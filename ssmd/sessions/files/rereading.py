"""States computed again from a session's text, for a file whose own states are not to be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ssmd.model.state import State
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Handle, Program
from ssmd.sessions.checkpoint import NewCheckpoint, Scope
from ssmd.sessions.files.contents import CheckpointPlace
from ssmd.sessions.line import Ids, Line
from ssmd.sessions.rows.blobs import EncodedCheckpoint, encode
from ssmd.sessions.turn import NewTurn
from ssmd.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rereader:
    """A loaded model that reads sessions of its lineage. progress: called with (tokens read so far, tokens of all).

    scope: as the engine's for this program.
    """

    program: Program
    tokenizer: Tokenizer
    scope: Scope
    progress: Callable[[int, int], None] = lambda read, of: None

    def spelled(self, turns: Iterable[NewTurn], stems: Mapping[str, str | None]) -> set[str]:
        """Return the ids of the turns whose token ids spell their text and nothing else. `turns`: parents first.

        A turn with a stem adds its part to the stem's text, at a place where text can be cut.
        """
        found: dict[str, NewTurn] = {}
        for turn in turns:
            stem = stems.get(turn.id)
            if stem is not None:
                if stem not in found:
                    continue
                before = found[stem].text.own
                if not self.tokenizer.ends_at_control(before + turn.text.own, len(before)):
                    continue
            if self.tokenizer.spells(turn.ids.own.tolist(), turn.text.own):
                found[turn.id] = turn
        return set(found)

    def compute(self, wanted: Iterable[tuple[CheckpointPlace, Line]]) -> list[EncodedCheckpoint]:
        """Compute checkpoints at marks, each with all ids before it, parents first. They have no origin.

        A mark beyond the program's context is skipped. Branches are read from the start. Raises the program's errors.
        """
        unique: dict[bytes, tuple[CheckpointPlace, Ids]] = {}
        most = self.program.context
        for mark, line in wanted:
            ids = line.own[: max(0, mark.position)]
            if not line.start and 0 < mark.position == len(ids) and (most is None or len(ids) <= most):
                unique.setdefault(ids.astype(">i4").tobytes(), (mark, ids))
        in_order = [unique[key] for key in sorted(unique)]  # common beginnings come together, the shorter ones first
        return self._read(in_order)

    def _read(self, wanted: list[tuple[CheckpointPlace, Ids]]) -> list[EncodedCheckpoint]:
        whole = _tokens_to_read([ids for _, ids in wanted])
        done: list[EncodedCheckpoint] = []
        handle: Handle = None
        fed, read = np.empty(0, np.int32), 0
        parent: NewCheckpoint | None = None
        try:
            for mark, ids in wanted:
                if handle is None or _shared(fed, ids) < len(fed):
                    self.program.release(handle) if handle is not None else None
                    handle, fed, parent = self.program.new_state(), fed[:0], None
                at = len(fed)
                for n in buckets.pieces(at, len(ids), self.program.buckets):
                    self.program.prefill(handle, ids[at : at + n].tolist())
                    at, read = at + n, read + n
                    self.progress(read, whole)
                fed = ids
                state = self.program.save(handle, since=parent.state.position if parent else 0)
                checkpoint = NewCheckpoint(mark.kind, Line(ids), state, parent, turn=mark.turn)
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
        goes_on = _shared(above, ids) == len(above)
        total += len(ids) - (len(above) if goes_on else 0)
        above = ids
    return total


def _shared(a: Ids, b: Ids) -> int:
    """Count the ids with which both begin."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n
