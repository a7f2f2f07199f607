"""The work of an engine with a store beside computing: it restores states, keeps new ones and turns, and rerenders.

It decides which states of a request are stored, and which ids each of them covers. The state after the system prompt is
one, and that at the end of each choice. Those inside the prompt (restore.py) and before its last token are stored if
they are worth their writes. The last one leaves out a token because a restore gives no logits.

A prompt that takes long to read has its newest state written now and then. A client that gives up, or a daemon that is
killed, then loses little of the reading.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

from ssmd.engine.decode.choice import Choice
from ssmd.engine.decode.device import run_tokens
from ssmd.engine.decode.generation import GenerationInput, GenerationStore, RestoredState, Then
from ssmd.engine.persist import replay, restore
from ssmd.engine.persist.rerender import Rerenderer, WarmReader
from ssmd.engine.persist.restore import Restorer, Restoring
from ssmd.engine.persist.writer import COMMIT_PATIENCE_S, PendingCheckpoint, Writer
from ssmd.engine.prompt.planner import Planner, Prompt
from ssmd.engine.request import Finish, Request
from ssmd.engine.terms import Rejection, Steps
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Handle, Program
from ssmd.sessions.checkpoint import IN_MEMORY, ON_DISK, CheckpointKind, Maker, NewCheckpoint, Seal, StoredCheckpoint
from ssmd.sessions.line import Line
from ssmd.sessions.remote.remote import RemoteState
from ssmd.sessions.rows.warm import warm_turn
from ssmd.sessions.turn import NewTurn, SessionInfo, StoreError, conversation
from ssmd.text.messages import Message
from ssmd.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
REMEMBERED = 64  # conversations of earlier processes whose beginnings are compared with new prompts
ALIKE = 256  # tokens by which a deeper state that came meanwhile must be likely, for a second look-up
PROGRESS_S = 10.0  # s of reading a prompt after which its newest state is written


class NoPersistence:
    """The persistence of an engine without a store."""

    idle = True

    def look_for_warm(self) -> None:
        """Do nothing: nothing is kept warm."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def begin(self, asked: GenerationInput) -> GenerationStore:
        """Begin a request, of which nothing is kept."""
        return GenerationStore()

    def warm_up(self, tokens: int) -> Steps:
        """Feed `tokens` tokens to a new state and release it."""
        return run_tokens(self._program, tokens)

    def has_work(self) -> bool:
        """Return False: there is no deferred work."""
        return False

    def work(self) -> None:
        """Do nothing: there is no deferred work."""

    def pause(self) -> None:
        """Do nothing: there is no work to pause."""

    def close(self) -> None:
        """Do nothing: there is nothing to write."""


class Persistence:
    """The persistence of an engine with a store, through the store's writer. For its worker only, but for `begin`.

    wake: called when a state was restored, or a turn is to be rerendered.
    """

    def __init__(
        self,
        writer: Writer,
        program: Program,
        planner: Planner,
        tokenizer: Tokenizer,
        *,
        build: str,
        wake: Callable[[], None],
    ) -> None:
        self._program, self._tokenizer, self._build, self._wake = program, tokenizer, build, wake
        self._writer, self._store, self._planner = writer, writer.store, planner
        self._recurrent_nbytes = sum(t.nbytes_at(0) for t in program.spec.recurrent)
        self._made = Maker(planner.scope, program.producer, program.spec)
        self._cell = buckets.grid(program.buckets)
        self._seen = restore.SeenPrompts(self._cell)
        with contextlib.suppress(StoreError):
            for owner, ids in self._store.beginnings(planner.scope.lineage, REMEMBERED):
                self._seen.parted(owner, ids)
        damaged, written = partial(writer.heal, spec=program.spec), partial(writer.after, within_s=COMMIT_PATIENCE_S)
        self._restorer = Restorer(program, self._store, planner.scope, damaged=damaged, written=written)
        self._rerenderer = Rerenderer(planner, program, writer, self._restorer, self._made, wake=wake)
        self._warm = WarmReader(planner, program, writer, self._restorer, self._made, wake=wake)
        self.look_for_warm()

    @property
    def idle(self) -> bool:
        """Return True if no turn is rerendered or waits for that. From any thread."""
        return self._rerenderer.idle and self._warm.idle

    def look_for_warm(self) -> None:
        """Queue the warm beginnings whose state is not stored, and learn the states of the others. From any thread."""
        self._warm.look()

    def count_warm(self, found: StoredCheckpoint) -> None:
        """Count the tokens that a request did not read because it starts from the state of a warm beginning."""
        if found.id in self._warm.states:
            self._writer.count_warm(found.position)

    def defer(self, asked: GenerationInput, then: Then) -> None:
        """Write a warm beginning without its state, to be read when no request waits. Then call `then`, once."""
        _WarmStore(self, asked).write(then)

    def begin(self, asked: GenerationInput) -> GenerationStore:
        """Begin a request, of which nothing is stored yet. From any thread."""
        if asked.request.warm is not None:
            return _WarmStore(self, asked)
        makes_a_turn = asked.request.store and asked.request.raw is None
        return _TurnStore(self, asked) if makes_a_turn else _PrefixStore(self, asked)

    def warm_up(self, tokens: int) -> Steps:
        """Restore the conversation that was used last, feed it `tokens` tokens, and release it. It may go on soon.

        The next restore then finds memory, connections, queries and graphs ready.
        """
        loaded = None
        session = self._store.newest()
        if session is not None:
            said = conversation(self._store.path(session.head))
            with contextlib.suppress(Rejection):
                request = Request((*said, Message("user", secrets.token_hex(12))), store=False)
                prompt = self._planner.plan(request)
                yield
                found = (prompt.found, prompt.ids, prompt.stem)
                loaded = yield from self._restorer.steps(*found, session.info.id, request.domain)
        yield from run_tokens(self._program, tokens, None if loaded is None else loaded.handle)

    def has_work(self) -> bool:
        """Return True if `work` has something to do."""
        return self._rerenderer.ready() or self._warm.ready()

    def work(self) -> None:
        """Do a piece of deferred work. It takes no longer than one bucket or a restore."""
        self._rerenderer.step() if self._rerenderer.ready() else self._warm.step()

    def pause(self) -> None:
        """Drop the work in progress because a request came. It is begun again later."""
        self._rerenderer.pause()
        self._warm.pause()

    def close(self) -> None:
        """Finish queued writes, after the worker has stopped."""
        self._rerenderer.close()
        self._warm.close()
        self._writer.flush()
        self._restorer.close()


class _TurnStore(GenerationStore):
    """The states and turns of one request, which go to the store."""

    _seal: Seal | None = None  # of all its states

    def __init__(self, by: Persistence, asked: GenerationInput) -> None:
        self._by, self._asked, self._prompt = by, asked, asked.prompt
        self._info = asked.prompt.info
        prompt = asked.prompt
        seen = prompt.ids if asked.request.warm is None else prompt.ids.up_to(prompt.system)
        parted, apart = by._seen.parted(asked.request.domain.owner, seen)
        self.parted_at = parted if apart else None
        first, last = 0 if prompt.found is None else prompt.found.start, len(prompt.ids) - 1
        recurrent, ends, wanted = by._recurrent_nbytes > 0, (prompt.system, last), (parted, *prompt.parts)
        # The positions inside the prompt at which its state is kept.
        self._inside = restore.inside(first, last, wanted, by._cell, recurrent=recurrent, ends=ends)
        self._alike = parted - first >= ALIKE  # an earlier prompt shares more than the state that was found
        self._progress: PendingCheckpoint | None = None  # the newest state of a prompt that takes long
        self._written_at = time.perf_counter()  # when a state was last written at once
        self._restoring: Restoring | None = None
        self._checkpoints: list[PendingCheckpoint] = []
        # The checkpoint that the next one grows from, and its position.
        self._parent: tuple[int | NewCheckpoint | None, int] = (None, 0)
        self._origin: str | None = None  # set if the state came from an import: states that grow from it have it too
        self._turns: list[Choice] = []
        # A checkpoint of another request's, which may belong to no turn, and from which the next one grows.
        self._lent: int | PendingCheckpoint | None = None
        self._let_lent_go: Callable[[], None] = lambda: None

    @property
    def shareable(self) -> bool:
        """Return False if its states grow from an import, which serves one session alone."""
        found = self._prompt.found
        return self._origin is None and (found is None or found.origin is None)

    def restore(self, *, again: bool = False) -> None:
        if self._prompt.found is not None or again or self._alike:
            again, request = again or self._alike, self._asked.request
            self._restoring = self._by._restorer.begin(
                self._prompt, self._asked.session, request.domain, self._by._wake, client=request.client, again=again
            )

    def publish(self) -> None:
        self._by._writer.publish(tuple(self._checkpoints))

    def grow_from(self, other: GenerationStore, handle: Handle, position: int, read_ms: float) -> None:
        """As in GenerationStore. A state where the two part is kept once, by the one that has read it.

        Then later states of both have the same rows, and are stored once too.
        """
        alike = isinstance(other, _TurnStore) and other._seal == self._seal and other._owner == self._owner
        if not isinstance(other, _TurnStore) or not alike or other._parent[1] > position:
            self.prefilled(handle, position, read_ms)
            return
        above = other._parent[1]
        if position in self._inside and above < position and other._pays((position - above) * read_ms):
            other.keep(other._save(handle, "prefix", other._prompt.ids.up_to(position)))
        other.publish()  # before the states that grow from them
        self._parent, grown = other._parent, other._parent[0]
        if isinstance(grown, int):
            self._hold(grown)
        elif grown is not None:  # one of the other's own, or one that the other grows from itself
            lent = next((one for one in other._checkpoints if one.checkpoint is grown), other._lent)
            if lent is not None:
                self._hold(lent)

    def ready(self) -> bool:
        return self._restoring is None or self._restoring.done()

    def restored(self) -> RestoredState | None:
        if self._restoring is None:
            return None
        (self._prompt, loaded), self._restoring = self._restoring.result(), None
        found = loaded.found
        if found is None:
            return RestoredState(None, 0, "none", self._prompt)
        self._origin = found.origin
        if found.build == self._by._build and found.seal == self._seal:
            self._parent = (found.id, found.position)
            self._hold(found.id)  # of any kind: the request that made it may never make a turn
        self._by.count_warm(found)
        exact = found.is_exact(self._by._build, self._by._program.producer)
        return RestoredState(loaded.handle, found.start, "exact" if exact else "portable", self._prompt)

    def _hold(self, checkpoint: int | PendingCheckpoint) -> None:
        self._lent, self._let_lent_go = checkpoint, self._by._writer.hold(checkpoint)

    @property
    def _owner(self) -> str:
        """Return the owner of its states."""
        return self._asked.request.domain.owner if self._info is None else self._info.owner

    def discard(self) -> None:
        if self._restoring is not None:
            self._by._restorer.discard(self._restoring)
            self._restoring = None

    def stop(self, position: int, end: int) -> int:
        return next((p for p in self._inside if position < p < end), end)

    def prefilled(self, handle: Handle, position: int, read_ms: float) -> None:
        due, ids = time.perf_counter() - self._written_at >= PROGRESS_S, self._prompt.ids
        if position == self._prompt.system:
            self._keep(self._save(handle, "system", ids.up_to(position)), at_once=due)
        elif position in self._inside and self._pays((position - self._parent[1]) * read_ms):
            self._keep(self._save(handle, "prefix", ids.up_to(position)), at_once=due)
        elif due and position % self._by._cell == 0:
            self._keep_progress(self._save(handle, "prefix", ids.up_to(position)))

    def _keep_progress(self, checkpoint: NewCheckpoint | None) -> None:
        """Write a state at once, in place of the one before. No turn links to it, and no other state grows from it."""
        self._written_at = time.perf_counter()
        if checkpoint is not None:
            old, self._progress = self._progress, self._encode(checkpoint, at_once=True)
            self._by._writer.drop(old)

    def _encode(self, checkpoint: NewCheckpoint, *, at_once: bool) -> PendingCheckpoint | None:
        """Start to store a state. If it is written before its turn, so are those that it grows from."""
        return self._by._writer.encode(checkpoint, self._by._made, tuple(self._checkpoints), at_once=at_once)

    def save(self, handle: Handle, read_ms: float) -> NewCheckpoint | None:
        position = len(self._prompt.ids) - 1
        if not self._pays((position - self._parent[1]) * read_ms):
            return None
        return self._save(handle, "user", self._prompt.ids.up_to(position))

    def _pays(self, read_ms: float) -> bool:
        """Return True if a state is worth its write. read_ms: prefill time that it saves for a repeated request.

        The rows of the cache cost nothing: the state at the turn's end needs them too.
        """
        return self._by._writer.pace.pays(self._by._recurrent_nbytes, read_ms)

    def _save(self, handle: Handle, kind: CheckpointKind, ids: Line, turn: str | None = None) -> NewCheckpoint | None:
        """Copy a handle's state, for `keep`. turn: the turn that ends with it; None for the whole request."""
        if self._info is None:
            return None
        return self._saved(handle, kind, ids, turn, self._info.owner)

    def _saved(self, handle: Handle, kind: CheckpointKind, ids: Line, turn: str | None, owner: str) -> NewCheckpoint:
        parent, since = self._parent
        state = self._by._program.save(handle, since=since)
        return NewCheckpoint(kind, ids, state, parent, self._origin, turn, owner, self._seal)

    def keep(self, checkpoint: NewCheckpoint | None) -> None:
        self._keep(checkpoint, at_once=False)

    def _keep(self, checkpoint: NewCheckpoint | None, *, at_once: bool) -> None:
        if checkpoint is None:
            return
        if at_once:
            self._written_at = time.perf_counter()
        pending = self._encode(checkpoint, at_once=at_once)
        if pending is None:
            log.warning("request %s: a checkpoint is left out, the store is too far behind", self._asked.label)
            return
        self._checkpoints.append(pending)
        if checkpoint.kind != "turn":  # choices are siblings: each grows from the prompt
            self._parent = (checkpoint, checkpoint.state.position)

    @property
    def position(self) -> int:
        return self._parent[1]

    def end(self, choice: Choice) -> None:
        if choice.cut:  # no later request begins with the fed tokens
            return
        fed = self._by._program.position(choice.handle)
        ids = self._prompt.ids.then(choice.tokens).up_to(fed)
        self.keep(self._save(choice.handle, "turn", ids, choice.turn))

    def commit(self, choices: Sequence[Choice], done: Finish, then: Then) -> None:
        # Choices that were cut before they had a text become no turns.
        self._turns = [choice for choice in choices if choice.text or choice.calls or choice.end != "cancelled"]
        if self._info is None or not self._turns:
            self._by._writer.abandon(self._checkpoints)
            self._let_go(read=bool(choices))
            then(False, False)
            return
        turns = [_turn(self._info, self._prompt, choice) for choice in self._turns]
        key = self._asked.request.key
        reply = None if key is None else replay.keep(self._asked, self._turns, done, key)
        then = self._when_sent([turn.id for turn in turns], then)
        self._by._writer.commit(self._info, turns, tuple(self._checkpoints), then, reply, self._prompt.heard)
        self._checkpoints, self._parent = [], (None, 0)  # their states go as soon as they are written
        self._let_go(read=bool(choices))

    def _when_sent(self, turns: Sequence[str], then: Then) -> Then:
        """Return a function that calls `then` as soon as the remote has the turns, if it is to acknowledge them."""
        link = self._by._writer.remote
        if link is None or not link.acknowledges:
            return then

        def stored(text: bool, states: bool) -> None:
            if text:
                link.when_sent(turns, partial(then, text, states))
            else:
                then(text, states)

        return stored

    def _let_go(self, *, read: bool) -> None:
        """Release the states that no later state continues. Call it after the work that needs them was queued.

        The state of a prompt under way goes if all of the prompt was `read`. Otherwise it stays for a while.
        """
        self._let_lent_go()
        self._lent, self._let_lent_go = None, lambda: None
        pending, self._progress = self._progress, None
        if read:
            self._by._writer.drop(pending)
        elif pending is not None:
            self._by._writer.abandon([pending])

    def remote(self, stored: bool) -> RemoteState | None:
        link = self._by._writer.remote
        if link is None:
            return None
        return link.state([choice.turn for choice in self._turns]) if stored else "off"

    def rerender(self) -> None:
        if self._info is not None:
            request = self._asked.request
            self._by._rerenderer.add(self._info, self._turns, request.domain, request.given)


class _PrefixStore(_TurnStore):
    """The states of a request that makes no turn: of a raw prompt, or with "store": false.

    Those with "store": false are sealed: only a request with the same text finds and opens them.
    """

    def __init__(self, by: Persistence, asked: GenerationInput) -> None:
        super().__init__(by, asked)
        retention = asked.request.retention or by._writer.retention
        self._keeps = asked.request.store or retention != "none"
        if not asked.request.store:
            self._seal = IN_MEMORY if retention == "in_memory" else ON_DISK

    def _pays(self, read_ms: float) -> bool:
        return self._seal is None or super()._pays(read_ms)

    def _save(self, handle: Handle, kind: CheckpointKind, ids: Line, turn: str | None = None) -> NewCheckpoint | None:
        if not self._keeps or (self._seal is not None and ids.start):  # keys are made of all ids
            return None
        return self._saved(handle, kind, ids, None, self._asked.request.domain.owner)

    def end(self, choice: Choice) -> None:
        """Keep the state at the end of a message. A later raw prompt rarely continues the sampled text."""
        if self._asked.request.raw is None:
            super().end(choice)

    def commit(self, choices: Sequence[Choice], done: Finish, then: Then) -> None:
        found, kept = self._prompt.found, self._checkpoints

        def told(written: bool) -> None:
            self.states_kept = written
            then(False, False)

        self._checkpoints, self._parent = [], (None, 0)
        if self._keeps and (kept or found is not None):
            used = None if found is None else found.id
            self._by._writer.keep(kept, used, told, sealed=self._seal is not None)
        else:
            told(False)
        self._let_go(read=bool(choices))

    def rerender(self) -> None:
        """Read nothing again: there is no turn."""


class _WarmStore(_TurnStore):
    """The states of a warm beginning, and its turn, which has no answer. The state at its end is the turn's."""

    def __init__(self, by: Persistence, asked: GenerationInput) -> None:
        super().__init__(by, asked)
        self._turn = f"turn_{secrets.token_hex(12)}"

    def restored(self) -> RestoredState | None:
        found = super().restored()
        if found is None or found.handle is None or found.position != self._prompt.system:
            return found
        self._parent = (None, 0)  # the stored one is linked to the turn too
        if found.resume != "exact":  # its own state is to be this build's
            self._by._program.release(found.handle)
            return RestoredState(None, 0, "none", self._prompt)
        self._keep_end(found.handle)
        return found

    def prefilled(self, handle: Handle, position: int, read_ms: float) -> None:
        if position == self._prompt.system:
            self._keep_end(handle)
        else:
            super().prefilled(handle, position, read_ms)

    def grow_from(self, other: GenerationStore, handle: Handle, position: int, read_ms: float) -> None:
        super().grow_from(other, handle, position, read_ms)
        if position == self._prompt.system:
            self._keep_end(handle)

    def _keep_end(self, handle: Handle) -> None:
        self.keep(self._save(handle, "turn", self._prompt.ids.up_to(self._prompt.system), self._turn))

    def save(self, handle: Handle, read_ms: float) -> NewCheckpoint | None:
        return None

    def end(self, choice: Choice) -> None:
        """Keep nothing: what was drawn belongs to no conversation."""

    def commit(self, choices: Sequence[Choice], done: Finish, then: Then) -> None:
        if not choices:
            super().commit(choices, done, then)
        else:
            self.write(then)
            self._let_go(read=True)

    def write(self, then: Then) -> None:
        """Write the turn with the states that are kept so far. Then call `then`, once."""
        info, prompt = self._info, self._prompt
        assert info is not None  # the planner makes it
        ids = prompt.ids.up_to(prompt.system)
        turn = NewTurn(
            id=self._turn,
            session=info.id,
            parent=None,
            messages=prompt.new,
            answer=Message("assistant", ""),
            ids=ids,
            prompt_tokens=len(ids),
            text=prompt.text,
            finish="",
            complete=True,
            created_at=datetime.now(UTC),
        )

        def written(stored: bool, state_stored: bool) -> None:
            then(stored, state_stored)
            self._by.look_for_warm()

        self._by._writer.commit(info, [warm_turn(turn)], tuple(self._checkpoints), written)
        self._checkpoints, self._parent = [], (None, 0)

    def rerender(self) -> None:
        """Read nothing again: there is no answer."""


def _turn(info: SessionInfo, prompt: Prompt, choice: Choice) -> NewTurn:
    """Make the turn of a choice.

    Where text and tokens disagree (`choice.cut`), the turn's text and ids end with the prompt.
    """
    return NewTurn(
        id=choice.turn,
        session=info.id,
        parent=prompt.parent,
        messages=prompt.new,
        answer=Message("assistant", prompt.begun + choice.text, tool_calls=choice.calls),
        ids=prompt.ids if choice.cut else prompt.ids.then(choice.tokens),
        prompt_tokens=len(prompt.ids),
        text=prompt.text if choice.cut else prompt.text.then(choice.rendered),
        finish=choice.end or "cancelled",
        complete=choice.end != "cancelled",
        created_at=datetime.now(UTC),
        settled=prompt.settled,
        cut=prompt.cut,
    )
