"""Sessions made up for tests: a model whose state follows from the ids fed, and conversations that grow in a store."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ssmd.machine.folder import make_private
from ssmd.model.state import State, StateSpec, TensorSpec
from ssmd.sessions.checkpoint import NewCheckpoint, Scope, StoredCheckpoint
from ssmd.sessions.line import Ids, Line, Passage
from ssmd.sessions.rows.blobs import EncodedCheckpoint, encode
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.snapshot import EchoedTurn, Snapshot
from ssmd.sessions.store import CommitResult, Store
from ssmd.sessions.turn import NewTurn, SessionInfo
from ssmd.text.messages import Message

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
LINEAGE, BUILD, PRODUCER = "a" * 64, "b" * 64, "numpy 1 cpu 2 threads"
VOCABULARY = 500

HYBRID = StateSpec(
    (
        TensorSpec("conv_0", "conv", 0, (12, 3)),
        TensorSpec("ssm_0", "ssm", 0, (2, 4, 8)),
        TensorSpec("key_1", "key", 1, (2, 6), "float16"),
        TensorSpec("value_1", "value", 1, (2, 6), "float16"),
        TensorSpec("ssm_2", "ssm", 2, (2, 4, 8)),
        TensorSpec("key_3", "key", 3, (1, 8), "float16"),
        TensorSpec("value_3", "value", 3, (1, 8), "float16"),
    )
)
ATTENTION = StateSpec(
    tuple(
        t
        for i in range(3)
        for t in (TensorSpec(f"key_{i}", "key", i, (2, 8)), TensorSpec(f"value_{i}", "value", i, (2, 8)))
    )
)
RECURRENT = StateSpec((TensorSpec("conv_0", "conv", 0, (12, 3)), TensorSpec("ssm_0", "ssm", 0, (16, 8))))
WINDOWS = StateSpec(
    (
        TensorSpec("conv_0", "conv", 0, (12, 3)),
        TensorSpec("window_key_1", "window_key", 1, (2, 5, 6)),
        TensorSpec("window_value_1", "window_value", 1, (2, 5, 6)),
        TensorSpec("key_2", "key", 2, (2, 6), "float16"),
        TensorSpec("value_2", "value", 2, (2, 6), "float16"),
    )
)
SPECS = {"hybrid": HYBRID, "attention": ATTENTION, "recurrent": RECURRENT, "windows": WINDOWS}
FED: dict[bytes, Ids] = {}  # the ids that a checkpoint was fed, by its key: of all that were encoded in this process


def state_of(spec: StateSpec, ids: Ids, since: int = 0) -> State:
    """Return the made-up model's state of `ids`: KV row i depends on ids[:i + 1], recurrent tensors on all of them."""
    tensors = {}
    for number, t in enumerate(spec.tensors):
        if t.recurrent:
            rng = np.random.default_rng([number, zlib.crc32(ids.tobytes())])
            tensors[t.name] = rng.standard_normal(t.shape).astype(t.numpy_dtype)
        else:
            seen = np.cumsum(ids.astype(np.float64) * (np.arange(len(ids)) + 1))[since:]  # [n - since]
            grid = seen[None, :, None] + np.arange(t.shape[0])[:, None, None] + np.arange(t.shape[1]) / 7 + number
            tensors[t.name] = np.sin(grid).astype(t.numpy_dtype)
    return State(len(ids), since, tensors)


def assert_same(a: State, b: State) -> None:
    """Bit for bit."""
    assert (a.position, a.since) == (b.position, b.since)
    assert set(a.tensors) == set(b.tensors)
    for name, expected in b.tensors.items():
        assert a.tensors[name].dtype == expected.dtype, name
        assert a.tensors[name].shape == expected.shape, name
        assert a.tensors[name].tobytes() == np.ascontiguousarray(expected).tobytes(), name


@cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Store.open(Path(folder)).close()
        return (Path(folder) / FILE).read_bytes()


def new_store(folder: Path) -> Store:
    """An empty store, made by copying one: Alembic takes 0.2 s to make it."""
    folder.mkdir(mode=0o700, parents=True)
    return open_store(folder)


def open_store(folder: Path, **options: int) -> Store:
    """Open the store of a folder; if there is none, copy an empty one. Options are those of `Store.open`."""
    lay_store(folder)
    return Store.open(folder, **options)


def lay_store(folder: Path) -> None:
    """Copy an empty store into a folder without one, for a daemon that opens it: making one takes it 50 ms."""
    make_private(folder)
    if not (folder / FILE).exists():
        with open(os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_empty_database())


def grown(store: Store | Snapshot, turn: str) -> tuple[Line, Passage]:
    """All ids and all text of a turn, put together from the turns above that it grew from."""
    turns = {t.id: t for t in store.path(turn)}
    pieces = [turns[turn]]
    while (stem := pieces[0].stem) is not None:
        ids, text, (above, before) = pieces[0].ids, pieces[0].text, (turns[stem].ids, turns[stem].text)
        assert (len(above), above.hash(len(above))) == (ids.start, ids.before)
        assert (len(before), before.hash(len(before))) == (text.start, text.before)
        pieces.insert(0, turns[stem])
    assert all(t.sound for t in pieces)
    line = pieces[-1].ids.after([t.ids for t in pieces[:-1]])
    passage = Passage("".join(t.text.own for t in pieces))
    assert (line.start, passage.start) == (0, 0)
    return line, passage


def echo_of(store: Store, messages: Sequence[Message], session: str | None = None) -> EchoedTurn | None:
    """The stored conversation that a request continues."""
    with store.snapshot() as stored:
        return stored.echoed(messages, session)


def resume(
    store: Store,
    scope: Scope,
    ids: Line,
    stem: str | None = None,
    session: str | None = None,
    *,
    skip: Collection[int] = (),
) -> tuple[StoredCheckpoint | None, Line, str | None]:
    """The deepest checkpoint for a prompt, with all ids that are to be fed after it."""
    with store.snapshot() as stored:
        return stored.resume(scope, ids, stem, session, skip=skip)


def whole(store: Store, turn: str) -> tuple[list[int], str]:
    """All ids of a turn, and all of its text."""
    ids, text = grown(store, turn)
    return ids.own.tolist(), text.own


def plain(turn: NewTurn) -> dict[str, Any]:
    """Return the fields of a turn without its ids and its text."""
    return {name: value for name, value in vars(turn).items() if name not in ("ids", "text")}


def find(
    store: Store, scope: Scope, ids: Sequence[int] | Ids, session: str | None = None, *, skip: Collection[int] = ()
) -> StoredCheckpoint | None:
    """The deepest checkpoint for a prompt of these ids."""
    return resume(store, scope, Line.of(ids), None, session, skip=skip)[0]


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str) -> Message:
    return Message("assistant", text)


def ids_of(messages: Sequence[Message], reply: str, tokens: int = 12) -> Ids:
    """The ids of a turn: as many of the input, and then of the answer."""
    seed = zlib.crc32("|".join([*(m.content for m in messages), reply]).encode(errors="replace"))
    return np.random.default_rng(seed).integers(0, VOCABULARY, 2 * tokens).astype(np.int32)


class Chat:
    """A session of the made-up model, as the engine would write it: a user and a turn checkpoint with every turn."""

    def __init__(
        self, store: Store, session: str, spec: StateSpec = HYBRID, *, build: str = BUILD, owner: str = ""
    ) -> None:
        self.store = store
        self.spec = spec
        self.scope = Scope(spec.digest(), LINEAGE, build)
        self.info = SessionInfo(session, "made-up", LINEAGE, START, owner=owner)
        self.turns: dict[str, NewTurn] = {}
        self.ends: dict[str, tuple[int | None, Ids]] = {}  # turn -> its checkpoint, all ids fed
        self.clock = START

    def encode(self, checkpoint: NewCheckpoint) -> EncodedCheckpoint:
        done = encode(checkpoint, scope=self.scope, producer=PRODUCER, spec=self.spec)
        assert not checkpoint.ids.start, "all ids are at hand here"
        FED[done.key] = checkpoint.ids.own
        return replace(done, owner=self.info.owner)

    def make(
        self, turn: str, parent: str | None, messages: Sequence[Message], reply: str, tokens: int = 12
    ) -> tuple[NewTurn, list[NewCheckpoint]]:
        """The turn and its checkpoints, not yet written. `tokens`: ids of the input, and of the answer."""
        above, fed = self.ends[parent] if parent is not None else (None, np.empty(0, np.int32))
        before = self.turns[parent].ids.own if parent is not None else fed
        fresh = ids_of(messages, reply, tokens)
        prompt, whole = np.concatenate([before, fresh[:tokens]]), np.concatenate([before, fresh])
        text = self.turns[parent].text.own if parent is not None else ""
        text += "".join(f"<{m.role}>{m.content}</>" for m in messages) + f"<assistant>{reply}"
        self.clock += timedelta(seconds=1)
        new = NewTurn(
            id=turn,
            session=self.info.id,
            parent=parent,
            messages=tuple(messages),
            answer=answer(reply),
            ids=Line.of(whole),
            prompt_tokens=len(prompt),
            text=Passage(text),
            finish="stop",
            complete=True,
            created_at=self.clock,
            lineage=self.info.lineage,
        )
        at = len(fed) if above is not None and self.spec.rows else 0
        first = NewCheckpoint("user", Line.of(prompt), state_of(self.spec, prompt, at), above)
        at = len(prompt) if self.spec.rows else 0
        second = NewCheckpoint("turn", Line.of(whole[:-1]), state_of(self.spec, whole[:-1], at), first, turn=turn)
        return new, [first, second]

    def say(
        self, turn: str, parent: str | None, text: str, reply: str, *, system: str | None = None, tokens: int = 12
    ) -> CommitResult:
        messages = [*([Message("system", system)] if system is not None else []), user(text)]
        new, checkpoints = self.make(turn, parent, messages, reply, tokens)
        done = self.store.commit([new], [self.encode(c) for c in checkpoints], session=self.info)
        self.remember(new, done.checkpoints[-1].id)
        return done

    def remember(self, turn: NewTurn, checkpoint: int | None) -> None:
        """Go on from a turn, of which no more than its own part may be at hand."""
        if turn.ids.start:
            ids, text = grown(self.store, turn.id)
            turn = replace(turn, ids=ids, text=text)
        self.turns[turn.id] = turn
        self.ends[turn.id] = (checkpoint, turn.ids.own[:-1])

    def imported_as(self, origin: str) -> Chat:
        """The same session, but marked as one that came from elsewhere."""
        self.info = replace(self.info, imported=origin)
        return self
