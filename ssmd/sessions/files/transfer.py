"""Transfer of a session to a `.ssmd` file and from one. The format is described in docs/session-file.md."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from ssmd.machine.lockfile import lock
from ssmd.machine.privatefile import NOFOLLOW
from ssmd.machine.room import SparingFile
from ssmd.model.state import StateSpec
from ssmd.sessions.files import contents
from ssmd.sessions.files.packing import ExportResult, States, pack
from ssmd.sessions.files.rereading import Rereader
from ssmd.sessions.files.sessionfile import SessionFileError, SessionFileReader, open_session_file
from ssmd.sessions.line import NOTHING, SILENCE
from ssmd.sessions.rows.blobs import EncodedCheckpoint
from ssmd.sessions.rows.warm import WARM, warm_turn
from ssmd.sessions.store import Store
from ssmd.sessions.turn import NewTurn, SessionInfo

_UNFINISHED = ".ssmd-part"  # ends the name of a file that is not whole yet


@dataclass(frozen=True)
class LocalModel:
    """An installed model, which a session of its lineage must fit."""

    name: str
    spec: StateSpec
    vocabulary: int


@dataclass(frozen=True)
class ImportResult:
    """The result of an import."""

    session: str  # its id here; a new one if the file's own was taken
    renamed: bool
    turns: int
    checkpoints: int
    nbytes: int  # growth of the store
    model: str
    lineage: str
    dropped: int = 0  # states of the file that were not taken
    text_only: str = ""  # why only the messages were taken, so that the next request reads all; "" if not so


def export_session(
    store: Store, session_id: str, file: Path, *, force: bool = False, states: States = "newest", spare: int = 0
) -> ExportResult:
    """Write a session to a new file (mode 0600): all its turns, and the newest checkpoints of its current path.

    states: "all" for those of every branch, "none" for the text alone. spare: bytes that it must leave free on the
    disk. Raises UnknownSession, SessionFileError, StoreError. An existing path is refused unless `force`. The file
    appears whole or not at all.
    """
    if not force and os.path.lexists(file):
        raise SessionFileError(f"{file} exists already; choose another name, or overwrite it with --force")
    try:
        with _unfinished(file, spare) as (temporary, raw):
            with io.BufferedRandom(raw) as out, store.reading() as connection:
                result = pack(store, connection, store.session_in(connection, session_id), out, states)
            _publish(temporary, file, force=force)
    except OSError as err:
        raise SessionFileError(f"{file} cannot be written: {err.strerror or err}") from err
    except ValidationError as err:  # more turns than a file may have, say, or one that was damaged
        why = err.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, why["loc"]))
        raise SessionFileError(f"session {session_id!r} does not fit into a file: {where}: {why['msg']}") from err
    return result


@contextlib.contextmanager
def _unfinished(file: Path, spare: int) -> Iterator[tuple[Path, SparingFile]]:
    """Make a file beside `file`, locked until the body ends, and then remove it."""
    with contextlib.ExitStack() as held:
        while True:
            temporary = file.parent / f".{file.name[:100]}.{secrets.token_hex(6)}{_UNFINISHED}"
            raw = held.enter_context(SparingFile(temporary, spare))
            held.callback(temporary.unlink, missing_ok=True)
            with contextlib.suppress(OSError):  # a file system without locks
                lock(raw.fileno())
            if temporary.exists():  # else `remove_unfinished` of another process came before the lock
                break
        if sys.platform != "win32":  # it removes no open file
            held.callback(os.close, os.dup(raw.fileno()))
        yield temporary, raw


def remove_unfinished(folder: Path) -> None:
    """Remove the files that killed exports left in a folder. Those of running ones are locked."""
    for left in folder.glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDWR | NOFOLLOW)
            try:
                free = lock(descriptor)
                if free and sys.platform != "win32":  # before another process can lock it
                    left.unlink()
            finally:
                os.close(descriptor)
            if free and sys.platform == "win32":
                left.unlink()


def _publish(temporary: Path, file: Path, *, force: bool) -> None:
    if force:
        os.replace(temporary, file)
        return
    try:
        os.link(temporary, file)  # unlike a rename it never replaces a file that appeared meanwhile
    except FileExistsError as err:
        raise SessionFileError(f"{file} exists already; choose another name, or overwrite it with --force") from err
    except OSError:  # a file system without hard links
        os.rename(temporary, file)


def import_session(
    store: Store,
    file: Path,
    *,
    local: Mapping[str, LocalModel] | None = None,
    believe: bool = True,
    rereader: Rereader | None = None,
) -> ImportResult:
    """Read a session file into the store. Nothing is written unless every part of the file is sound.

    local: the installed models by lineage. If given, only the messages of a session of another lineage are taken.
    The file's checkpoints serve only the imported session, so a forged state cannot mislead another one.
    believe: False takes the messages alone, no id or state of the file.
    rereader: implies that. If it has the session's lineage, ids that spell the text are taken too, and states are
    computed again before anything is written.
    Raises SessionFileError, StoreError, and the errors of the rereader's program.
    """
    believe = believe and rereader is None
    with open_session_file(file) as reader:
        entry = reader.document.session
        stranger = _stranger(reader, local)
        model = local.get(entry.lineage) if local else None
        spec, vocabulary = (model.spec, model.vocabulary) if model else (None, None)
        found = contents.read(reader, spec=spec, vocabulary=vocabulary, states=believe and not stranger)
        dropped = len(reader.document.checkpoints) - len(found.checkpoints)
    turns, computed = found.turns, list[EncodedCheckpoint]()
    if rereader is not None and rereader.scope.lineage == entry.lineage:
        spelled = rereader.spelled(turns, found.stems)
        marks = [m for m in found.marks or _usual_marks(turns, entry.head) if m.turn in spelled]
        computed = rereader.compute((m, found.line(m.turn)) for m in marks)
        turns = [t if t.id in spelled else _messages_alone(t) for t in turns]
        reason = "" if any(len(t.ids) for t in turns) else "its ids do not spell its text"
    elif stranger or not believe:
        turns = [_messages_alone(t) for t in turns]
        reason = stranger or "the states of the file were not to be used"
    else:
        reason = ""
    session_id, names = entry.id, {t.id: t.id for t in turns}
    if renamed := store.taken(session_id, list(names)):
        session_id = f"ses_{secrets.token_hex(12)}"
        names = {t.id: f"turn_{secrets.token_hex(12)}" for t in turns}
    owner = store.domain.owner
    info = SessionInfo(session_id, entry.model, entry.lineage, found.clock, imported=session_id, owner=owner)
    own_turns = [
        replace(t, id=names[t.id], session=session_id, parent=None if t.parent is None else names[t.parent])
        for t in turns
    ]
    own = [replace(c, origin=session_id) for c in found.checkpoints] + computed
    own = [replace(c, turn=None if c.turn is None else names[c.turn], owner=owner) for c in own]
    done = store.adopt(info, own_turns, own, head=names[entry.head], title=entry.title)
    return ImportResult(
        session=session_id,
        renamed=renamed,
        turns=len(turns),
        checkpoints=len(done.checkpoints),
        nbytes=done.nbytes,
        model=entry.model,
        lineage=entry.lineage,
        dropped=dropped,
        text_only=reason,
    )


def import_warm(
    store: Store, file: Path, *, local: Mapping[str, LocalModel], trust: bool = False, name: str | None = None
) -> ImportResult:
    """Read a warm beginning from a session file into the store. It serves all requests of the store's domain.

    Without `trust` no state of the file is taken: a daemon computes it from the ids when no request waits.
    name: its title; None: the one that it had. Raises SessionFileError, StoreError.
    """
    with open_session_file(file) as reader:
        entry = reader.document.session
        if [turn.finish for turn in reader.document.turns] != [WARM]:
            raise reader.error("it holds a conversation, no warm beginning; import it with: ssmd session import")
        if stranger := _stranger(reader, local):
            raise reader.error(f"{stranger}; pull its model, or read the beginning again from its own file")
        model = local[entry.lineage]
        found = contents.read(reader, spec=model.spec, vocabulary=model.vocabulary, states=trust)
        if not len(found.turns[0].ids):
            raise reader.error("it has no token ids")
        dropped = len(reader.document.checkpoints) - len(found.checkpoints)
    owner, session, turn_id = store.domain.owner, f"ses_{secrets.token_hex(12)}", f"turn_{secrets.token_hex(12)}"
    turn = warm_turn(replace(found.turns[0], id=turn_id, session=session))
    own = [replace(c, turn=turn_id, owner=owner) for c in found.checkpoints]
    title = entry.title if name is None else name
    info = SessionInfo(
        session, model.name, entry.lineage, found.clock, pinned=True, imported=session, owner=owner, title=title
    )
    done = store.adopt(info, [turn], own, head=turn_id)
    kept = sum(placed.id is not None for placed in done.checkpoints)
    return ImportResult(session, False, 1, kept, done.nbytes, model.name, entry.lineage, dropped)


def _stranger(reader: SessionFileReader, local: Mapping[str, LocalModel] | None) -> str:
    """Return why no installed model can use the file's ids and states; "" if one can, or `local` is not known."""
    entry = reader.document.session
    if local is None or entry.lineage in local:
        return ""
    here = ", ".join(f"{m.name} ({lineage[:12]})" for lineage, m in sorted(local.items())) or "none"
    return f"it is of lineage {entry.lineage[:12]} (model {entry.model!r}), and the models here are: {here}"


def _messages_alone(turn: NewTurn) -> NewTurn:
    return replace(turn, ids=NOTHING, text=SILENCE, prompt_tokens=0, cut=0)


def _usual_marks(turns: list[NewTurn], head: str) -> list[contents.CheckpointPlace]:
    """Return the places where an engine takes checkpoints of its last turn: a token before the answer, and its end."""
    last = next(t for t in turns if t.id == head)
    return [
        contents.CheckpointPlace(head, "user", last.prompt_tokens - 1),
        contents.CheckpointPlace(head, "turn", len(last.ids)),
    ]
