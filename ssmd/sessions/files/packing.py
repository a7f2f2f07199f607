"""Writing of a session file: it picks the states, makes the document, and writes the tensors one after the other."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal

import numpy as np
from sqlalchemy import Connection

from ssmd import __version__
from ssmd.model.state import DTYPES, StateSpec
from ssmd.sessions.checkpoint import prefix_keys
from ssmd.sessions.files.document import (
    FORMAT,
    MAX_CHECKPOINTS,
    CheckpointEntry,
    Document,
    RowsEntry,
    SessionEntry,
    TensorEntry,
    TurnEntry,
    as_entries,
)
from ssmd.sessions.files.sessionfile import SessionFileWriter, dtype_name
from ssmd.sessions.line import Ids
from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import turns as turn_rows
from ssmd.sessions.rows.checkpoints import CheckpointRow
from ssmd.sessions.rows.sessions import default_title
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Session, StoreError, Turn, items_of, title_problem

States = Literal["newest", "all", "none"]
_NO_IDS = np.empty(0, np.int32)
_MAX_REPEATED = 2  # bytes of rows that an import cannot share, over bytes of the file's states


@dataclass(frozen=True)
class ExportResult:
    """The result of an export. left_out: wanted states that did not fit into one file; their text is in it."""

    turns: int
    checkpoints: int
    nbytes: int
    left_out: int = 0


def pack(store: Store, connection: Connection, session: Session, out: BinaryIO, states: States) -> ExportResult:
    """Write a session to a file. Raises SessionFileError, StoreError.

    states: "newest" of the current path, "all" branches' newest, "none". States of another model than the one that
    answered last are left out, as are the ids of turns that it did not answer.
    """
    tree = turn_rows.read_tree(connection, session.id)
    head = next((t for t in tree if t.id == session.head), None)
    if head is None:
        raise StoreError(f"session {session.id!r} is broken: its current turn {session.head!r} is missing")
    if altered := next((t.id for t in tree if not t.sound), None):
        raise StoreError(f"turn {altered!r} was altered; `ssmd session check --repair` takes out what is broken")
    lineage = head.lineage or session.info.lineage
    wanted, left_out = _chosen(connection, tree, head, lineage, states)
    known = {t.id: t for t in tree if t.lineage == lineage}
    stored = [c for c in wanted if _is_named(c, known)]  # a rendering may have replaced the ids of a prompt's state
    left_out += len(wanted) - len(stored)
    chunks: dict[int, tuple[int, int, str]] = {s[0]: s[1:] for c in stored for s in c.segments}
    numbers = {segment: k for k, segment in enumerate(chunks)}
    spec = stored[0].spec if stored else None
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    turns, tails = _turn_entries(tree, lineage)
    for i, tail in enumerate(tails):
        shapes[f"turn.{i}.ids"] = ("I32", tail.shape)
    for i, c in enumerate(stored):
        for t in c.spec.recurrent:
            shapes[f"checkpoint.{i}.{t.name}"] = (dtype_name(DTYPES[c.dtype]), t.shape)
    for k, (first, last, dtype) in enumerate(chunks.values()):
        for t in spec.rows if spec else ():
            shapes[f"rows.{k}.{t.name}"] = (dtype_name(DTYPES[dtype]), t.shape_at(last - first))
    info = session.info
    given = session.title if session.title != _default_title(tree) and not title_problem(session.title) else None
    document = Document(
        format=FORMAT,
        written_by=f"ssmd {__version__}",
        session=SessionEntry(
            id=info.id, model=info.model, lineage=lineage, clock=info.clock.isoformat(), head=session.head, title=given
        ),
        turns=turns,
        layout=[TensorEntry.model_validate(t) for t in spec.to_json()] if spec else [],
        checkpoints=[_checkpoint_entry(c, numbers) for c in stored],
        rows=[RowsEntry(first=first, last=last) for first, last, _ in chunks.values()],
    )
    writer = SessionFileWriter(out, document, shapes)
    for i, tail in enumerate(tails):
        writer.write(f"turn.{i}.ids", tail)
    written: set[int] = set()
    for i, c in enumerate(stored):
        _write_state(store, connection, writer, i, c, numbers, written)
    writer.seal()
    return ExportResult(len(tree), len(stored), out.seek(0, os.SEEK_END), left_out)


def _default_title(tree: Sequence[Turn]) -> str:
    first = next((t for t in tree if t.parent is None), None)
    return "" if first is None else default_title(first.messages)


def _write_state(
    store: Store,
    connection: Connection,
    writer: SessionFileWriter,
    i: int,
    c: CheckpointRow,
    numbers: Mapping[int, int],
    written: set[int],
) -> None:
    try:
        state = store.load_in(connection, c.id, as_stored(c))
    except StoreError as err:
        raise StoreError(f"{err}; the text alone can be exported without states") from err
    for t in c.spec.recurrent:
        writer.write(f"checkpoint.{i}.{t.name}", state.tensors[t.name])
    for segment, first, last, dtype in c.segments:
        if segment not in written:
            written.add(segment)
            for t in c.spec.rows:
                rows = state.tensors[t.name][:, first:last]
                writer.write(f"rows.{numbers[segment]}.{t.name}", rows.astype(DTYPES[dtype], copy=False))


def as_stored(c: CheckpointRow) -> StateSpec:
    """Return the layout with dtypes that hold the stored values without loss."""
    rows = "float32" if any(s[3] == "float32" for s in c.segments) else "float16"
    return StateSpec(tuple(replace(t, dtype=c.dtype if t.recurrent else rows) for t in c.spec.tensors))


def _chosen(
    connection: Connection, tree: Sequence[Turn], head: Turn, lineage: str, states: States
) -> tuple[list[CheckpointRow], int]:
    """Return the checkpoints to write, those of the current path first; and the number of wanted ones left out."""
    if states == "none":
        return [], 0
    above = {t.id: t.parent for t in tree}
    chosen = checkpoint_rows.newest_on_path(connection, _path(above, head.id), lineage)
    if states == "newest":
        return chosen, 0
    children = Counter(t.parent for t in tree)
    # Branches share the rows up to where they part: its checkpoint lets an import share them too.
    forks = [t for t in tree if children[t.id] > 1]
    leaves = sorted((t for t in tree if not children[t.id]), key=lambda t: t.created_at, reverse=True)
    wanted = {c.id: c for c in chosen}
    for turn in [*forks, *leaves]:
        newest = checkpoint_rows.newest_on_path(connection, _path(above, turn.id), lineage)
        for c in newest[:1] if children[turn.id] else newest:
            if not wanted or c.spec.digest() == next(iter(wanted.values())).spec.digest():
                wanted.setdefault(c.id, c)
    fitting = _sharing(list(wanted.values())[:MAX_CHECKPOINTS], own=len(chosen))
    return fitting, len(wanted) - len(fitting)


def _path(above: Mapping[str, str | None], turn: str) -> list[str]:
    """Return the turns of a path, root first."""
    path: list[str] = []
    at: str | None = turn
    while at is not None:
        path.append(at)
        at = above[at]
    return path[::-1]


def _sharing(stored: Sequence[CheckpointRow], own: int) -> list[CheckpointRow]:
    """Leave out checkpoints with unshared rows that would make an import refuse the file.

    The first `own` are never left out.
    """
    spec = stored[0].spec if stored else None
    unique = sum(t.nbytes_at(0) for t in spec.recurrent) * len(stored) if spec else 0
    unique += _rows_nbytes(spec, {s for c in stored for s in c.segments})
    kept: list[CheckpointRow] = []
    seen: set[int] = set()
    repeated = 0
    for i, c in sorted(enumerate(stored), key=lambda x: (x[0] >= own, x[1].position)):
        parents = [k for k in kept if k.build == c.build and k.segments == c.segments[: len(k.segments)]]
        parent = max(parents, key=lambda k: len(k.segments), default=None)
        loose = c.segments[len(parent.segments) if parent else 0 :]
        again = _rows_nbytes(spec, [s for s in loose if s[0] in seen])
        if i >= own and repeated + again > _MAX_REPEATED * unique:
            continue
        repeated += again
        seen.update(s[0] for s in c.segments)
        kept.append(c)
    return kept


def _rows_nbytes(spec: StateSpec | None, segments: Iterable[tuple[int, int, int, str]]) -> int:
    return sum(t.nbytes_at(last - first) for t in (spec.rows if spec else ()) for _, first, last, _ in segments)


def _checkpoint_entry(c: CheckpointRow, numbers: Mapping[int, int]) -> CheckpointEntry:
    fields = {"turn": c.turn, "kind": c.kind, "position": c.position, "build": c.build, "producer": c.producer}
    return CheckpointEntry.model_validate(fields | {"rows": [numbers[s[0]] for s in c.segments]})


def _is_named(c: CheckpointRow, turns: Mapping[str, Turn]) -> bool:
    """Return True if a checkpoint's ids are a prefix of its turn's ids."""
    at = turns.get(c.turn)
    while at is not None and at.ids.start > c.position:
        at = turns.get(at.stem) if at.stem is not None else None
    if at is None or c.position > len(at.ids):
        return False
    return prefix_keys(c.layout, c.lineage, at.ids, [c.position]) == [c.key]


def _turn_entries(tree: Sequence[Turn], lineage: str) -> tuple[list[TurnEntry], list[Ids]]:
    """Return the turns, and for each the ids beyond its stem's. Ids of another lineage would mean other text."""
    entries, tails = [], []
    for turn in tree:
        ours = turn.lineage == lineage
        items, answer = items_of(turn.id, turn.conversation)
        tails.append(turn.ids.own if ours else _NO_IDS)
        entries.append(
            TurnEntry(
                id=turn.id,
                parent=turn.parent,
                stem=turn.stem if ours else None,
                cut=turn.cut if ours else 0,
                items=as_entries(items),
                answer=as_entries(answer),
                text=turn.text.own if ours else "",
                prompt_tokens=turn.prompt_tokens if ours else 0,
                finish=turn.finish,
                complete=turn.complete,
                created_at=turn.created_at.isoformat(),
            )
        )
    return entries, tails
