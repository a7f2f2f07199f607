"""Rerendering: an answer whose rendered text differs from the fed text is prefilled again while the engine is idle.

Causes are a stop string, trimmed spaces, or a template that drops reasoning from earlier answers. The next request then
renders the answer differently than it was generated, so no state of its end can be a beginning of that request. When
the engine is idle, the answer is fed again as later requests will render it. This starts from the state before the
answer; the state after it is stored.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from ssmd.engine.decode.choice import Choice
from ssmd.engine.persist.restore import LoadedState, Restorer
from ssmd.engine.persist.writer import Writer
from ssmd.engine.prompt.planner import Planner
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Handle, Program
from ssmd.sessions.checkpoint import Maker, NewCheckpoint
from ssmd.sessions.line import Passage
from ssmd.sessions.turn import Domain, SessionInfo, StoreError
from ssmd.text.template import NOTHING_MORE, TemplateInput

log = logging.getLogger(__name__)
MAX_WAITING = 256  # turns that wait; beyond it the oldest are dropped, and read again when they are continued
MAX_TRIES = 3  # tries of a turn; each request that comes meanwhile costs one


@dataclass(frozen=True)
class _Turn:
    """A turn to prefill again. cut: its text and its tokens disagree, so that no state of its end was kept.

    domain, given: of the request that made it. They are kept in memory only, like this queue.
    """

    id: str
    session: SessionInfo
    cut: bool
    domain: Domain
    given: TemplateInput
    tries: int = 0


@dataclass(frozen=True, eq=False)
class _Plan:
    """A planned prefill. text: start of every continuation. loaded: the state to start from, and the ids to feed."""

    text: Passage
    loaded: LoadedState


class Rerenderer:
    """Prefills answers again as templates render them. `add` from any thread; `step` and `pause` from the worker's
    alone. wake: called when there is something to do.
    """

    def __init__(
        self,
        planner: Planner,
        program: Program,
        writer: Writer,
        restorer: Restorer,
        made: Maker,
        *,
        wake: Callable[[], None],
    ) -> None:
        self._planner, self._program, self._store, self._writer = planner, program, writer.store, writer
        self._restorer, self._made = restorer, made
        self._wake = wake
        self._waiting: deque[_Turn] = deque(maxlen=MAX_WAITING)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="ssmd-rerender")
        self._turn: _Turn | None = None  # the turn in work
        self._planning: Future[_Plan | None] | None = None
        self._plan: _Plan | None = None
        self._handle: Handle = None

    def add(
        self, session: SessionInfo, turns: Sequence[Choice], domain: Domain, given: TemplateInput = NOTHING_MORE
    ) -> None:
        """Queue the stored turns of a request, one for each of these choices."""
        with self._lock:
            self._waiting.extend(_Turn(choice.turn, session, choice.cut, domain, given) for choice in turns)
        self._wake()

    @property
    def idle(self) -> bool:
        """Return True if no turn is in work or waits. From any thread."""
        with self._lock:
            return self._turn is None and not self._waiting

    def ready(self) -> bool:
        """Return True if `step` has something to do."""
        if self._turn is None:
            return bool(self._waiting)
        return self._planning is None or self._planning.done()

    def step(self) -> None:
        """Do a piece of work for the worker. It takes no longer than a bucket or a restore. Never raises."""
        try:
            self._step()
        except Exception:
            log.exception("turn %s could not be rerendered; it is read again when it is continued", self._turn)
            self._drop()

    def pause(self) -> None:
        """Drop the work in progress because a request came. It is queued again, up to MAX_TRIES times."""
        turn = self._turn
        if turn is None:
            return
        self._drop()
        if turn.tries + 1 < MAX_TRIES:
            with self._lock:
                self._waiting.append(replace(turn, tries=turn.tries + 1))

    def close(self) -> None:
        """Stop. The worker has stopped before."""
        self._drop()
        self._threads.shutdown(cancel_futures=True)

    def _drop(self) -> None:
        if self._planning is not None:
            self._planning.cancel()
            self._planning.add_done_callback(self._release)
        if self._handle is not None:
            self._program.release(self._handle)
        self._turn = self._planning = self._plan = self._handle = None

    def _release(self, planning: Future[_Plan | None]) -> None:
        """Release the handle of a plan that was dropped."""
        if planning.cancelled() or planning.exception() is not None:
            return
        plan = planning.result()
        if plan is not None and plan.loaded.handle is not None:
            self._program.release(plan.loaded.handle)

    def _step(self) -> None:
        if self._turn is None:
            with self._lock:  # so that `idle` sees the turn in one place or the other
                self._turn = self._waiting.popleft() if self._waiting else None
            if self._turn is not None:
                self._planning = self._threads.submit(self._make_plan, self._turn)
                self._planning.add_done_callback(lambda _: self._wake())
        elif self._planning is not None:
            if self._planning.done():
                self._plan, self._planning = self._planning.result(), None
                self._begin()
        else:
            self._feed(self._turn)

    def _make_plan(self, turn: _Turn) -> _Plan | None:
        """Plan the prefill of a turn, in a thread of its own. None if it needs none."""
        try:
            with self._store.of(turn.domain).snapshot() as stored:
                if not stored.is_leaf(turn.id):  # it was continued already
                    return None
                settled = self._planner.settled(stored, stored.turn(turn.id), turn.session, turn.given)
                if settled is None:
                    return None
                shown, agrees = settled
                room = self._program.context is None or len(shown.ids) < self._program.context
                if (agrees and not turn.cut) or not room:
                    return None
                found, ids, stem = stored.resume(self._planner.scope, shown.ids, shown.stem, turn.session.id)
            loaded = self._restorer.load(found, ids, stem, turn.session.id, turn.domain)
            return None if loaded is None else _Plan(shown.text, loaded)
        except StoreError as err:  # removed meanwhile, or damaged, which `session check` repairs
            log.info("turn %s is not rerendered: %s", turn.id, err)
            return None

    def _begin(self) -> None:
        if self._plan is None:
            self._drop()
            return
        handle = self._plan.loaded.handle
        self._handle = self._program.new_state() if handle is None else handle

    def _feed(self, turn: _Turn) -> None:
        plan = self._plan
        assert plan is not None
        position, ids = self._program.position(self._handle), plan.loaded.ids
        if position < len(ids):
            n = buckets.piece(position, len(ids), self._program.buckets)
            self._program.prefill(self._handle, ids.since(position)[:n].tolist())
            position += n
        if position == len(ids):
            self._keep(turn, plan)
            self._drop()

    def _keep(self, turn: _Turn, plan: _Plan) -> None:
        """Save the state and queue it for the writer, with the text and the ids that it stands for."""
        found, ids = plan.loaded.found, plan.loaded.ids
        # A sealed state's rows cannot be shared.
        shares = found is not None and found.build == self._made.scope.build and found.seal is None
        parent = found if shares and found is not None and found.position < len(ids) else None
        state = self._program.save(self._handle, since=0 if parent is None else parent.position)
        origin = None if found is None else found.origin
        number = None if parent is None else parent.id
        checkpoint = NewCheckpoint("turn", ids, state, number, origin, turn.id, turn.session.owner)
        pending = self._writer.encode(checkpoint, self._made)
        if pending is not None:
            self._writer.rewrite(turn.id, ids, plan.text, pending)


class WarmReader(Rerenderer):
    """Reads warm beginnings whose state is not stored: those to be read when idle, imported or lost ones.

    A request that comes meanwhile interrupts the reading, and loses none of it. A state that the store did not take is
    not computed again in this process.
    states: ids of the checkpoints of warm beginnings.
    """

    states: frozenset[int] = frozenset()
    _tried: frozenset[str] = frozenset()  # turns that were queued and have no state yet

    def look(self) -> None:
        """Queue the beginnings that are to be read, and learn the states of all. From any thread. Raises nothing."""
        try:
            unread, self.states = self._store.unread_warm(self._planner.scope), self._store.warm_states()
        except StoreError as err:
            log.warning("warm beginnings cannot be looked up: %s", err)
            return
        with self._lock:
            new = [(name, info) for name, info in unread if name not in self._tried]
            self._tried = frozenset(name for name, _ in unread)
            for name, info in new:
                self._waiting.append(_Turn(name, info, False, Domain(info.owner, (info.owner,)), NOTHING_MORE))
        if new:
            self._wake()

    def pause(self) -> None:
        """Keep the work in progress for the next time when no request waits."""

    def _make_plan(self, turn: _Turn) -> _Plan | None:
        with contextlib.suppress(StoreError), self._store.of(turn.domain).snapshot() as stored:
            kept, context = stored.turn(turn.id), self._program.context
            ids, scope = kept.ids, self._planner.scope
            if not kept.sound or not 0 < len(ids) < (context or len(ids) + 1):
                log.warning("warm beginning %s cannot be read with this model", turn.session.id)
                return None
            more = ids.then([int(ids.own[-1])])  # a state is found only if a token follows it
            found, *_ = stored.resume(scope, more)
            if (
                found is not None
                and found.position == len(ids)
                and not found.is_exact(scope.build, self._made.producer)
            ):
                found, *_ = stored.resume(scope, more, skip=[found.id])
            loaded = self._restorer.load(found, more, None, None, turn.domain)
            return None if loaded is None else _Plan(kept.text, replace(loaded, ids=ids))
        return None

    def _keep(self, turn: _Turn, plan: _Plan) -> None:
        super()._keep(turn, plan)
        self._writer.after(self.look)
