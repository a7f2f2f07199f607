"""Restoring: checkpoints are read into handles of a program in a thread of its own, so that other streams go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from ssmd.model.state import StateError
from ssmd.runtime.protocol import Handle, Program
from ssmd.sessions.checkpoint import Found, Ids, Scope
from ssmd.sessions.rows.parts import DamagedState
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

log = logging.getLogger(__name__)
Restoring = Future[tuple[Found, Handle] | None]


class Restorer:
    """Restores checkpoints into handles: `load` from any thread; `begin` puts it into a thread of its own.

    damaged: told of a checkpoint whose bytes are not those that were written.
    """

    def __init__(self, program: Program, store: Store, scope: Scope, *, damaged: Callable[[int], None]) -> None:
        self._program, self._store, self._scope, self._damaged = program, store, scope, damaged
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ssmd-restore")

    def begin(self, found: Found, ids: Ids, session: str | None, then: Callable[[], None]) -> Restoring:
        """Load in the background, as `load` does; `then` is called when it is done."""
        restoring = self._thread.submit(self.load, found, ids, session)
        restoring.add_done_callback(lambda _: then())
        return restoring

    def load(self, found: Found | None, ids: Ids, session: str | None) -> tuple[Found, Handle] | None:
        """A handle restored from `found`, or from the next best checkpoint that can be read, if there is any."""
        steps = self.steps(found, ids, session)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                loaded: tuple[Found, Handle] | None = end.value
                return loaded

    def steps(
        self, found: Found | None, ids: Ids, session: str | None
    ) -> Generator[None, None, tuple[Found, Handle] | None]:
        """Load part by part, as `load` does. Closed before its end, or failing, it has released what it had."""
        if found is None:
            return None
        try:
            for candidate in self._store.usable(found, self._scope, ids, session):
                handle = None
                try:
                    with self._store.parts(candidate.id, self._program.spec) as (position, parts):
                        handle = self._program.reserve(position)
                        for part in parts:
                            self._program.fill(handle, part)
                            yield
                    return candidate, handle
                except BaseException as err:
                    if handle is not None:
                        self._program.release(handle)
                    if not isinstance(err, StoreError | StateError):
                        raise  # nobody wants it any more, or the device is lost: whoever waits is told
                    log.error("checkpoint %s cannot be used, the next best is: %s", candidate.id, err)
                    if isinstance(err, DamagedState):
                        self._damaged(candidate.id)
        except StoreError as err:
            log.error("no other checkpoint can be looked up, the prompt is read whole: %s", err)
        return None

    def discard(self, restoring: Restoring) -> None:
        """Release what is being loaded: nobody waits for it any more."""
        restoring.cancel()
        restoring.add_done_callback(self._release)

    def close(self) -> None:
        self._thread.shutdown()

    def _release(self, restoring: Restoring) -> None:
        if not restoring.cancelled() and restoring.exception() is None and (loaded := restoring.result()) is not None:
            self._program.release(loaded[1])
