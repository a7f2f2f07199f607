"""Moving a session: to a `.ssmd` file and from one. The format is described in docs/session-file.md."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import Connection

from ssmd import __version__
from ssmd.sessions import checkpoints as checkpoint_rows
from ssmd.sessions import contents
from ssmd.sessions import turns as turn_rows
from ssmd.sessions.checkpoint import Ids
from ssmd.sessions.checkpoints import Stored
from ssmd.sessions.document import (
    FORMAT,
    CheckpointEntry,
    Document,
    MessageEntry,
    RowsEntry,
    SessionEntry,
    TensorEntry,
    TurnEntry,
)
from ssmd.sessions.sessionfile import (
    SessionFileError,
    SessionFileReader,
    SessionFileWriter,
    dtype_name,
    open_session_file,
)
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Session, SessionInfo, Turn
from ssmd.state import DTYPES, StateSpec


@dataclass(frozen=True)
class Exported:
    turns: int
    checkpoints: int
    nbytes: int


@dataclass(frozen=True)
class Local:
    """A model that is here: what a session of its lineage must fit."""

    name: str
    spec: StateSpec
    vocabulary: int


@dataclass(frozen=True)
class ImportResult:
    """session: its id here, another one than in the file if that was taken. nbytes: what the store grew by."""

    session: str
    renamed: bool
    turns: int
    checkpoints: int
    nbytes: int
    model: str
    lineage: str


def export_session(store: Store, session_id: str, file: Path, *, force: bool = False) -> Exported:
    """Write a session, all its turns and the newest checkpoints of its current path, to a new file (mode 0600).

    Raises UnknownSession, SessionFileError; an existing path is refused unless `force`. The file appears whole or not
    at all.
    """
    if not force and os.path.lexists(file):
        raise SessionFileError(f"{file} exists already; choose another name, or overwrite it with --force")
    temporary = file.parent / f".{file.name[:100]}.{secrets.token_hex(6)}.tmp"
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w+b") as out, store.reading() as connection:
                result = _write(store, connection, store.session_in(connection, session_id), out)
            _publish(temporary, file, force=force)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as err:
        raise SessionFileError(f"{file} cannot be written: {err.strerror or err}") from err
    return result


def _publish(temporary: Path, file: Path, *, force: bool) -> None:
    if force:
        os.replace(temporary, file)
        return
    try:
        os.link(temporary, file)  # unlike a rename it never replaces what came there meanwhile
    except FileExistsError as err:
        raise SessionFileError(f"{file} exists already; choose another name, or overwrite it with --force") from err
    except OSError:  # a file system without hard links
        os.rename(temporary, file)


def _write(store: Store, connection: Connection, session: Session, out: BinaryIO) -> Exported:
    info, head = session.info, session.head
    tree = turn_rows.read_tree(connection, session.id)
    path = [t.id for t in turn_rows.read_path(connection, head)]
    stored = checkpoint_rows.newest_on_path(connection, path, info.lineage)
    chunks: dict[int, tuple[int, int, str]] = {s[0]: s[1:] for c in stored for s in c.segments}
    numbers = {segment: k for k, segment in enumerate(chunks)}
    spec = stored[0].spec if stored else None
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    turns, tails = _turn_entries(tree)
    for i, tail in enumerate(tails):
        shapes[f"turn.{i}.ids"] = ("I32", tail.shape)
    for i, c in enumerate(stored):
        shapes[f"checkpoint.{i}.ids"] = ("I32", c.ids.shape)
        for t in c.spec.recurrent:
            shapes[f"checkpoint.{i}.{t.name}"] = (dtype_name(DTYPES[c.dtype]), t.shape)
    for k, (first, last, dtype) in enumerate(chunks.values()):
        for t in spec.rows if spec else ():
            shapes[f"rows.{k}.{t.name}"] = (dtype_name(DTYPES[dtype]), t.shape_at(last - first))
    document = Document(
        format=FORMAT,
        written_by=f"ssmd {__version__}",
        session=SessionEntry(
            id=info.id, model=info.model, lineage=info.lineage, clock=info.clock.isoformat(), head=head
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
        writer.write(f"checkpoint.{i}.ids", c.ids)
        state = store.load_in(connection, c.id, _as_stored(c))
        for t in c.spec.recurrent:
            writer.write(f"checkpoint.{i}.{t.name}", state.tensors[t.name])
        for segment, first, last, dtype in c.segments:
            if segment not in written:
                written.add(segment)
                for t in c.spec.rows:
                    rows = state.tensors[t.name][:, first:last]
                    writer.write(f"rows.{numbers[segment]}.{t.name}", rows.astype(DTYPES[dtype], copy=False))
    writer.seal()
    return Exported(len(tree), len(stored), out.seek(0, os.SEEK_END))


def _as_stored(c: Stored) -> StateSpec:
    """The layout in dtypes that hold what is stored without loss."""
    rows = "float32" if any(s[3] == "float32" for s in c.segments) else "float16"
    return StateSpec(tuple(replace(t, dtype=c.dtype if t.recurrent else rows) for t in c.spec.tensors))


def _checkpoint_entry(c: Stored, numbers: Mapping[int, int]) -> CheckpointEntry:
    fields = {"turn": c.turn, "kind": c.kind, "build": c.build, "producer": c.producer}
    return CheckpointEntry.model_validate(fields | {"rows": [numbers[s[0]] for s in c.segments]})


def _turn_entries(tree: Sequence[Turn]) -> tuple[list[TurnEntry], list[Ids]]:
    entries, tails = [], []
    seen: dict[str | None, Turn] = {}
    for turn in tree:
        above = seen.get(turn.parent)
        ids_shared = turn_rows.shared_ids(turn.ids, above.ids) if above else 0
        text_shared = turn_rows.shared_text(turn.text, above.text) if above else 0
        tails.append(turn.ids[ids_shared:])
        entries.append(
            TurnEntry(
                id=turn.id,
                parent=turn.parent,
                messages=[MessageEntry.model_validate(m.to_json()) for m in turn.messages],
                answer=MessageEntry.model_validate(turn.answer.to_json()),
                ids_shared=ids_shared,
                text_shared=text_shared,
                text=turn.text[text_shared:],
                prompt_tokens=turn.prompt_tokens,
                finish=turn.finish,
                complete=turn.complete,
                created_at=turn.created_at.isoformat(),
            )
        )
        seen[turn.id] = turn
    return entries, tails


def import_session(store: Store, file: Path, *, local: Mapping[str, Local] | None = None) -> ImportResult:
    """Read a session file into the store. Nothing is written unless every part of the file is sound.

    local: the models that are here, by lineage; a session of another lineage is refused then. Its checkpoints serve
    only the imported session: a forged state can mislead nobody else. Raises SessionFileError, StoreError.
    """
    with open_session_file(file) as reader:
        entry = reader.document.session
        model = _local_model(reader, local)
        spec, vocabulary = (model.spec, model.vocabulary) if model else (None, None)
        found = contents.read(reader, spec=spec, vocabulary=vocabulary)
    session_id, names = entry.id, {t.id: t.id for t in found.turns}
    if renamed := store.taken(session_id, list(names)):
        session_id = f"ses_{secrets.token_hex(12)}"
        names = {t.id: f"turn_{secrets.token_hex(12)}" for t in found.turns}
    info = SessionInfo(session_id, entry.model, entry.lineage, found.clock, imported=session_id)
    own_turns = [
        replace(t, id=names[t.id], session=session_id, parent=None if t.parent is None else names[t.parent])
        for t in found.turns
    ]
    own = [replace(c, origin=session_id, turn=None if c.turn is None else names[c.turn]) for c in found.checkpoints]
    done = store.adopt(info, own_turns, own, head=names[entry.head])
    return ImportResult(
        session=session_id,
        renamed=renamed,
        turns=len(found.turns),
        checkpoints=len(done.checkpoints),
        nbytes=done.nbytes,
        model=entry.model,
        lineage=entry.lineage,
    )


def _local_model(reader: SessionFileReader, local: Mapping[str, Local] | None) -> Local | None:
    entry = reader.document.session
    if local is None:
        return None
    if entry.lineage not in local:
        here = ", ".join(f"{m.name} ({lineage[:12]})" for lineage, m in sorted(local.items())) or "none"
        raise reader.error(
            f"it is of lineage {entry.lineage[:12]} (model {entry.model!r}), and the models here are: {here}; "
            "build or pull that model first"
        )
    return local[entry.lineage]
