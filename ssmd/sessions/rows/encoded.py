"""Encoded checkpoints: everything that committing one needs, ready before the database is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ssmd.model.state import StateError, StateSpec
from ssmd.sessions.checkpoint import KINDS, CheckpointKind, NewCheckpoint, Scope, prefix_keys
from ssmd.sessions.line import anchor
from ssmd.sessions.rows.blobs import Blob, cut


@dataclass(frozen=True, eq=False)
class Encoded:
    """A checkpoint ready to be written. `parent` is an id, the key of one on its way, or None."""

    scope: Scope
    producer: str
    kind: CheckpointKind
    spec: StateSpec
    position: int
    key: bytes
    anchor: bytes
    parent: int | bytes | None
    since: int  # KV rows from here on
    parent_key: bytes | None  # what the parent's key must be, as it holds the rows below `since`
    origin: str | None
    turn: str | None
    owner: str
    pieces: tuple[Blob, ...]
    segments: tuple[Blob, ...]

    @property
    def recurrent_nbytes(self) -> int:
        return sum(len(b.data) for b in self.pieces)

    @property
    def rows_nbytes(self) -> int:
        return sum(len(b.data) for b in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes that committing it adds to the store."""
        return self.recurrent_nbytes + self.rows_nbytes

    @property
    def has_data(self) -> bool:
        return all(b.data for b in (*self.pieces, *self.segments))

    def without_data(self) -> Encoded:
        """Drop the data once it is stored; what linking the checkpoint takes stays."""

        def emptied(blobs: tuple[Blob, ...]) -> tuple[Blob, ...]:
            return tuple(replace(b, data=b"") for b in blobs)

        return replace(self, pieces=emptied(self.pieces), segments=emptied(self.segments))


def encode(checkpoint: NewCheckpoint, *, scope: Scope, producer: str, spec: StateSpec) -> Encoded:
    """Prepare and hash everything that committing `checkpoint` needs.

    It touches no database, and may run on any thread as soon as the state was saved. Raises StateError if the state is
    not one of `spec` at this position, or not finite; ValueError if ids and position disagree.
    """
    state, parent = checkpoint.state, checkpoint.parent
    ids = checkpoint.ids
    if checkpoint.kind not in KINDS:
        raise ValueError(f"checkpoint kind {checkpoint.kind!r}, expected one of {KINDS}")
    if not 1 <= state.position == len(ids):
        raise ValueError(f"a checkpoint at position {state.position} needs that many ids, not {len(ids)}")
    if scope.layout != spec.digest():
        raise StateError(f"scope of layout {scope.layout} does not belong to a state of layout {spec.digest()}")
    if spec.rows and (parent is None) != (state.since == 0):
        raise StateError(f"a state with rows from {state.since} on needs {'a' if state.since else 'no'} parent")
    if isinstance(parent, NewCheckpoint) and spec.rows and parent.state.position != state.since:
        raise StateError(f"rows start at {state.since}, the parent ends at {parent.state.position}")
    state.check(spec)
    mark = anchor(state.position)
    anchor_key, key = prefix_keys(scope.layout, scope.lineage, ids, [mark, state.position])
    above: int | bytes | None = None
    parent_key = None
    if isinstance(parent, NewCheckpoint):
        (above,) = prefix_keys(scope.layout, scope.lineage, parent.ids, [parent.state.position])
    else:
        above = parent
    if spec.rows and parent is not None:
        (parent_key,) = prefix_keys(scope.layout, scope.lineage, ids, [state.since])
    pieces, segments = cut(state, spec)
    return Encoded(
        scope=scope,
        producer=producer,
        kind=checkpoint.kind,
        spec=spec,
        position=state.position,
        key=key,
        anchor=anchor_key,
        parent=above,
        since=state.since if spec.rows else 0,
        parent_key=parent_key,
        origin=checkpoint.origin,
        turn=checkpoint.turn,
        owner=checkpoint.owner,
        pieces=pieces,
        segments=segments,
    )
