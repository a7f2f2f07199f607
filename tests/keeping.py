"""Sessions made up for tests: a model whose state follows from the ids fed, and conversations that grow in a store."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import numpy as np

from ssmd.model.state import State, StateSpec, TensorSpec
from ssmd.sessions.checkpoint import Ids, NewCheckpoint, Scope
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.encoded import Encoded, encode
from ssmd.sessions.store import Committed, Store
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
SPECS = {"hybrid": HYBRID, "attention": ATTENTION, "recurrent": RECURRENT}


def state_of(spec: StateSpec, ids: Ids, since: int = 0) -> State:
    """What the made-up model remembers of `ids`: KV row i depends on ids[:i + 1], recurrent tensors on all of them."""
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
    (folder / FILE).write_bytes(_empty_database())
    return Store.open(folder)


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str) -> Message:
    return Message("assistant", text)


class Chat:
    """A session of the made-up model, as the engine would write it: a user and a turn checkpoint with every turn."""

    def __init__(self, store: Store, session: str, spec: StateSpec = HYBRID, *, build: str = BUILD) -> None:
        self.store = store
        self.spec = spec
        self.scope = Scope(spec.digest(), LINEAGE, build)
        self.info = SessionInfo(session, "made-up", LINEAGE, START)
        self.turns: dict[str, NewTurn] = {}
        self.ends: dict[str, tuple[int | None, Ids]] = {}  # turn -> its checkpoint, all ids fed
        self.clock = START

    def encode(self, checkpoint: NewCheckpoint) -> Encoded:
        return encode(checkpoint, scope=self.scope, producer=PRODUCER, spec=self.spec)

    def make(
        self, turn: str, parent: str | None, messages: Sequence[Message], reply: str, tokens: int = 12
    ) -> tuple[NewTurn, list[NewCheckpoint]]:
        """The turn and its checkpoints, not yet written. `tokens`: ids of the input, and of the answer."""
        above, before = self.ends[parent] if parent is not None else (None, np.empty(0, np.int32))
        seed = zlib.crc32("|".join([*(m.content for m in messages), reply]).encode(errors="replace"))
        fresh = np.random.default_rng(seed).integers(0, VOCABULARY, 2 * tokens).astype(np.int32)
        prompt, whole = np.concatenate([before, fresh[:tokens]]), np.concatenate([before, fresh])
        text = self.turns[parent].text if parent is not None else ""
        text += "".join(f"<{m.role}>{m.content}</>" for m in messages) + f"<assistant>{reply}"
        self.clock += timedelta(seconds=1)
        new = NewTurn(
            id=turn,
            session=self.info.id,
            parent=parent,
            messages=tuple(messages),
            answer=answer(reply),
            ids=whole,
            prompt_tokens=len(prompt),
            text=text,
            finish="stop",
            complete=True,
            created_at=self.clock,
            lineage=self.info.lineage,
        )
        at = len(before) if above is not None and self.spec.rows else 0
        first = NewCheckpoint("user", prompt, state_of(self.spec, prompt, at), above)
        at = len(prompt) if self.spec.rows else 0
        second = NewCheckpoint("turn", whole[:-1], state_of(self.spec, whole[:-1], at), first, turn=turn)
        return new, [first, second]

    def say(
        self, turn: str, parent: str | None, text: str, reply: str, *, system: str | None = None, tokens: int = 12
    ) -> Committed:
        messages = [*([Message("system", system)] if system is not None else []), user(text)]
        new, checkpoints = self.make(turn, parent, messages, reply, tokens)
        done = self.store.commit([new], [self.encode(c) for c in checkpoints], session=self.info)
        self.remember(new, done.checkpoints[-1].id)
        return done

    def remember(self, turn: NewTurn, checkpoint: int | None) -> None:
        self.turns[turn.id] = turn
        self.ends[turn.id] = (checkpoint, turn.ids[:-1])

    def imported_as(self, origin: str) -> Chat:
        """The same session, but marked as one that came from elsewhere."""
        self.info = replace(self.info, imported=origin)
        return self
