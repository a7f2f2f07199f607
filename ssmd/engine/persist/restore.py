"""Positions of a prompt at which states are kept, and the restoring of these states for later prompts.

A later prompt may part from this one anywhere, and a recurrent state cannot be cut back. So some states are kept inside
a prompt, beside the ends of its system prompt, of itself and of its answer: at the end of its tools and of its first
system messages; at the point where it parts from an earlier one, as a third one may part there too; and on a widening
grid. All these positions are multiples of the program's grid, where prefill stops in any case: no result depends on
them.

Checkpoints are read into handles of a program in a thread of its own, so that other streams go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from ssmd.engine.prompt.planner import Prompt
from ssmd.model.state import StateError
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Handle, Program
from ssmd.sessions.checkpoint import Scope, SealedLine, StoredCheckpoint
from ssmd.sessions.line import Line, anchors
from ssmd.sessions.rows.blobs import DamagedState, RemovedState
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain, StoreError

log = logging.getLogger(__name__)
FIRST = 1024  # tokens at which the widening grid begins for a recurrent state, which is stored whole each time
NEAR = 256  # a position so few tokens before another one is left out
MOST_SEEN = 1 << 15  # grid cells of earlier prompts that are remembered, some 100 bytes each
_HASHED = 16  # bytes of a hash that are remembered


@dataclass(frozen=True, eq=False)
class LoadedState:
    """The state that a prompt starts from, in a handle."""

    found: StoredCheckpoint | None  # None for a new state
    handle: Handle | None  # None for a new state
    ids: Line  # all at hand that are to be fed after it


Loading = Generator[None, None, LoadedState | None]
Restoring = Future[tuple[Prompt, LoadedState]]


class Restorer:
    """Restores checkpoints into handles: `load` from any thread; `begin` in a thread of its own.

    damaged: called with the id of a checkpoint that was found damaged. written: calls its argument, once, when the
    states that are being written now are written or late. From any thread.
    """

    def __init__(
        self,
        program: Program,
        store: Store,
        scope: Scope,
        *,
        damaged: Callable[[int], None],
        written: Callable[[Callable[[], None]], None] = lambda then: then(),
    ) -> None:
        self._program, self._store, self._scope, self._damaged = program, store, scope, damaged
        self._written = written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ssmd-restore")
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by client; the next one's is the first

    def begin(
        self,
        prompt: Prompt,
        session: str | None,
        domain: Domain,
        then: Callable[[], None],
        *,
        client: str,
        again: bool = False,
    ) -> Restoring:
        """Load the state that a prompt starts from, in the background. `then` is called when that is done.

        The prompt is returned with it. If its stored data cannot be read, it is rendered again from the request's
        messages. client: clients alternate, so that none waits for all the states of another one. again: look for a
        deeper state before, among those that are being written. Others' states are restored meanwhile.
        """
        restoring = Restoring()
        restoring.add_done_callback(lambda _: then())

        def run() -> None:
            if restoring.set_running_or_notify_cancel():
                try:
                    restoring.set_result(self._load(prompt, session, domain, again))
                except BaseException as err:
                    restoring.set_exception(err)

        def submit() -> None:
            with self._lock:
                self._waiting.setdefault(client, deque()).append(run)
            try:
                self._thread.submit(self._run_next)
            except RuntimeError:  # it is closed
                restoring.cancel()

        self._written(submit) if again else submit()
        return restoring

    def _run_next(self) -> None:
        with self._lock:
            client = next(iter(self._waiting))
            mine = self._waiting.pop(client)
            run = mine.popleft()
            if mine:
                self._waiting[client] = mine  # behind the others
        run()

    def _load(self, prompt: Prompt, session: str | None, domain: Domain, again: bool) -> tuple[Prompt, LoadedState]:
        if again:
            with contextlib.suppress(StoreError), self._store.of(domain).snapshot() as stored:
                found, ids, stem = stored.resume(self._scope, prompt.ids, prompt.stem, session)
                # A raw prompt has no text; its prefill stops at no system prompt, so that its rows are others.
                if found is not None and len(prompt.text) and not self._program.spec.recurrent:
                    found = stored.lengthen(self._scope, found, ids, buckets.grid(self._program.buckets))
                if found is not None and (prompt.found is None or found.start >= prompt.found.start):
                    prompt = replace(prompt.reaching(ids), found=found, stem=stem)
        loaded = self.load(prompt.found, prompt.ids, prompt.stem, session, domain)
        if loaded is not None:
            return prompt.reaching(loaded.ids), loaded
        anew = prompt.reread()
        return anew, LoadedState(None, None, anew.ids)

    def load(
        self, found: StoredCheckpoint | None, ids: Line, stem: str | None, session: str | None, domain: Domain
    ) -> LoadedState | None:
        """Restore a handle from `found`, or from the next best checkpoint that can be read, if there is any.

        None if neither a state nor all the ids could be read.
        """
        steps = self.steps(found, ids, stem, session, domain)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                loaded: LoadedState | None = end.value
                return loaded

    def steps(
        self, found: StoredCheckpoint | None, ids: Line, stem: str | None, session: str | None, domain: Domain
    ) -> Loading:
        """Load part by part, as `load` does. Releases the handle if it fails or is closed before its end."""
        tried: list[int] = []
        try:
            while found is not None:
                handle = None
                number, end = (found.id, None) if found.longer is None else found.longer
                try:
                    opened = self._store.parts(number, self._program.spec, self._sealed(found, ids), end=end)
                    with opened as (position, parts):
                        handle = self._program.reserve(position)
                        for part in parts:
                            self._program.fill(handle, part)
                            yield
                    return LoadedState(found, handle, ids)
                except BaseException as err:
                    if handle is not None:
                        self._program.release(handle)
                    if not isinstance(err, StoreError | StateError):
                        raise  # the request ended, or the device is lost: the caller gets the error
                    level = logging.INFO if isinstance(err, RemovedState) else logging.ERROR
                    log.log(level, "checkpoint %s cannot be used, trying the next best one: %s", number, err)
                    if isinstance(err, DamagedState):
                        self._damaged(number)
                if found.longer is not None:
                    found = replace(found, longer=None)
                    continue
                tried.append(found.id)
                with self._store.of(domain).snapshot() as stored:
                    found, ids, stem = stored.resume(self._scope, ids, stem, session, skip=tried)
        except StoreError as err:
            log.error("no other checkpoint can be looked up, the prompt is read whole: %s", err)
        return None if ids.start else LoadedState(None, None, ids)

    def _sealed(self, found: StoredCheckpoint, ids: Line) -> SealedLine | None:
        seal, scope = found.seal, self._scope
        return None if seal is None else SealedLine(seal, scope.layout, scope.lineage, ids)

    def discard(self, restoring: Restoring) -> None:
        """Release a state that is being loaded: its request has ended."""
        restoring.cancel()
        restoring.add_done_callback(self._release)

    def close(self) -> None:
        self._thread.shutdown()

    def _release(self, restoring: Restoring) -> None:
        if not restoring.cancelled() and restoring.exception() is None:
            _, loaded = restoring.result()
            if loaded.handle is not None:
                self._program.release(loaded.handle)


class SeenPrompts:
    """The beginnings of earlier prompts, as hashes at the grid's positions. Thread-safe; the oldest are forgotten.

    Owners see only their own: no client learns what another one asked.
    """

    def __init__(self, cell: int, most: int = MOST_SEEN) -> None:
        """cell: tokens of the program's grid."""
        self._cell, self._most = cell, most
        # By owner and hash: the length of the last prompt that had this cell, and the hash of all its ids.
        self._seen: OrderedDict[tuple[str, bytes], tuple[int, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def parted(self, owner: str, ids: Line) -> tuple[int, bool]:
        """Return how many tokens a prompt shares with an earlier one, rounded down to the grid. Then remember it.

        0 if it shares none of those at hand. The second value is True if both go on there, with other tokens. It is
        False if that is not known, as the prompt is shorter than the earlier one and ends within a cell.
        """
        cell = self._cell
        positions = range(-(-max(ids.start, 1) // cell) * cell, len(ids), cell)
        names = [(owner, hashed[:_HASHED]) for hashed in ids.hashes(positions)]
        whole = len(ids), _named(ids, len(ids))
        with self._lock:
            at = next((i for i in reversed(range(len(names))) if names[i] in self._seen), None)
            earlier = None if at is None else self._seen[names[at]]
            for name in names:
                self._seen[name] = whole
                self._seen.move_to_end(name)
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)
        if at is None or earlier is None:
            return 0, False
        length, end = earlier
        if ids.start <= length <= len(ids):
            return positions[at], _named(ids, length) != end
        return positions[at], at + 1 < len(names)


def _named(ids: Line, length: int) -> bytes:
    """Hash the first ids. `Line.hash` has the last ones as they are."""
    return hashlib.blake2b(ids.hash(length), digest_size=_HASHED).digest()


def inside(
    first: int, last: int, wanted: Sequence[int], cell: int, *, recurrent: bool, ends: Sequence[int] = ()
) -> list[int]:
    """List the positions between `first` and `last` at which states are kept, ascending.

    first: position of the state that the prompt starts from. last: that of its last token. wanted: positions that
    other prompts are likely to share; they are rounded down to the grid. ends: where states are kept in any case.
    recurrent: a state is stored whole. Otherwise it is only rows of caches, each of which is stored once: then the
    positions lie so close that a later prompt reads at most an eighth of what it shares.
    """
    if recurrent:
        grid = [FIRST << n for n in range(max(0, last.bit_length() - FIRST.bit_length() + 1))]
    else:
        grid = [p for p in anchors(cell, last) if not p % cell]
    chosen = {p - p % cell for p in wanted}
    near = NEAR if recurrent else 0
    found = {p for p in grid if not any(p <= other < p + near for other in (*ends, *chosen))}
    return sorted(p for p in found | chosen if first < p < last and p not in ends)
