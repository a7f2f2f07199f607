"""What an engine with a store does beside computing: restores states, keeps new ones and turns, and rerenders."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable

from ssmd.engine import replay
from ssmd.engine.generation import Generation
from ssmd.engine.metrics import Metrics
from ssmd.engine.prompt import Planner
from ssmd.engine.request import Rejected, Request
from ssmd.engine.rerender import Rerenderer
from ssmd.engine.restore import Restorer
from ssmd.engine.warmup import Steps, run_tokens
from ssmd.engine.writer import Writer
from ssmd.runtime.protocol import Handle, Program
from ssmd.sessions.checkpoint import CheckpointKind, Ids, NewCheckpoint
from ssmd.sessions.reply import Reply, ReplyKey
from ssmd.sessions.store import Store
from ssmd.sessions.turn import conversation
from ssmd.text.messages import Message
from ssmd.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Persistence:
    """Used by the engine's worker, but for `reply`. wake: called when a state is there, or a turn to rerender."""

    def __init__(
        self,
        store: Store,
        program: Program,
        planner: Planner,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        build: str,
        wake: Callable[[], None],
    ) -> None:
        self._store, self._program, self._planner = store, program, planner
        self._tokenizer, self._wake = tokenizer, wake
        self._writer = Writer(store, metrics, scope=planner.scope, producer=program.producer, spec=program.spec)
        self._restorer = Restorer(planner, program, store)
        self.rerenderer = Rerenderer(planner, program, store, self._writer, self._restorer, build=build, wake=wake)

    def warm_up(self, tokens: int) -> Steps:
        """Take up the conversation that was used last, as its user may soon, feed it so many tokens and let go of it:
        the next one to be taken up finds memory, connections, queries and graphs ready."""
        loaded = None
        session = self._store.newest()
        if session is not None:
            said = conversation(self._store.path(session.head))
            with contextlib.suppress(Rejected):
                prompt = self._planner.plan(Request((*said, Message("user", secrets.token_hex(12))), store=False))
                yield
                loaded = yield from self._restorer.steps(prompt.found, prompt.ids, session.info.id)
        yield from run_tokens(self._program, tokens, None if loaded is None else loaded[1])

    def load(self, g: Generation) -> None:
        """Begin to load the state that a request starts from, if there is one."""
        prompt = g.prompt
        if prompt.found is not None:
            session = None if prompt.info is None else prompt.info.id
            g.restoring = self._restorer.begin(prompt.found, prompt.ids, session, self._wake)

    def discard(self, g: Generation) -> None:
        """The request ends before its state is there."""
        if g.restoring is not None:
            self._restorer.discard(g.restoring)
            g.restoring = None

    def checkpoint(
        self, g: Generation, handle: Handle, kind: CheckpointKind, ids: Ids, turn: str | None = None
    ) -> None:
        """`save` and `keep`."""
        saved = self.save(g, handle, kind, ids, turn)
        if saved is not None:
            self.keep(g, saved)

    def save(
        self, g: Generation, handle: Handle, kind: CheckpointKind, ids: Ids, turn: str | None = None
    ) -> NewCheckpoint | None:
        """A handle's state, for `keep`; None if nothing is kept. turn: whose end it is; None for all of the request."""
        if g.prompt.info is None:
            return None
        parent, since = g.parent
        return NewCheckpoint(kind, ids, self._program.save(handle, since=since), parent, g.origin, turn)

    def keep(self, g: Generation, checkpoint: NewCheckpoint) -> None:
        """Send a state on its way to the store; what is saved after it grows from it."""
        pending = self._writer.encode(checkpoint)
        if pending is None:
            log.warning("request %s: a checkpoint is left out, the store is too far behind", g.id)
            return
        g.checkpoints.append(pending)
        if checkpoint.kind != "turn":  # choices are siblings: each grows from the prompt
            g.parent = (checkpoint, checkpoint.state.position)

    def commit(self, g: Generation, then: Callable[[bool], None]) -> None:
        """Write the turns of a request with its checkpoints; `then(stored)`, from whatever thread."""
        kept = g.kept
        if g.prompt.info is None or not kept:
            self._writer.abandon(g.checkpoints)
            then(False)
            return
        turns = [g.prompt.turn(choice, self._tokenizer.escape(choice.text)) for choice in kept]
        reply = None if g.request.key is None else replay.keep(g, kept, g.request.key)
        self._writer.commit(g.prompt.info, turns, tuple(g.checkpoints), then, reply)
        g.checkpoints, g.parent = [], (None, 0)  # their states go as soon as they are written

    def reply(self, key: ReplyKey) -> Reply | None:
        """What a request was answered with. Blocks until all that ended before is written. Raises StoreError."""
        self._writer.flush()
        return self._store.reply(key)

    def close(self) -> None:
        """After the worker has stopped: write what waits."""
        self.rerenderer.close()
        self._writer.close()
        self._restorer.close()
