"""A PostgreSQL server as a remote uses it: connections, transactions with an end, and its errors in words.

No transaction outlives its request, no statement is prepared, and no lock is one of a session: PgBouncer may stand
between. A server that does not answer is given up after a while, also if it keeps its connection open.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ssmd.machine.installation import to_add
from ssmd.sessions.remote.postgres.address import Address, with_tls
from ssmd.sessions.remote.remote import RemoteError

OLDEST = 15  # version of PostgreSQL
ANSWER_S = 20.0  # s until a server that does not answer is given up
LOCK_MS = 5000  # ms that a statement waits for another machine's
_TRIES = 5
_KEPT = 2  # connections that stay open
_AGAIN = ("40001", "40P01", "55P03")  # SQLSTATE: serialization, deadlock, lock_timeout
_BUSY_S = 0.05  # s until the next try
_WORDS = {  # by SQLSTATE, or its class
    "53100": "its disk is full",
    "53": "it has no room for another connection, or no memory",
    "25006": "it is read-only",
    "57P03": "it starts or stops",
    "57": "it was stopped",
    "42501": "this role has no right to do that there: the administrator grants it, as docs/remote.md says",
}
_REFUSED = ("53100", "25006")  # SQLSTATE: it is full, it is read-only
_LASTING = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "does not exist", "certificate")
# Commits are on disk before they are reported, whatever the role's defaults are.
_SURELY = text(
    "SELECT set_config('synchronous_commit', 'on', true), set_config('lock_timeout', :lock, true),"
    " set_config('statement_timeout', :statement, true)"
)
_T = TypeVar("_T")


class Server:
    """Connections to a server. Thread-safe."""

    def __init__(self, address: Address) -> None:
        """Raises RemoteError if psycopg is missing, or the address is refused. Nothing is connected yet."""
        try:
            import psycopg
        except ImportError as err:
            said = f"a remote in PostgreSQL needs psycopg: {to_add('remote')}"
            raise RemoteError(said, lasting=True) from err
        found = (one for one in psycopg.pq.Conninfo.get_defaults() if one.val is not None)
        defaults = {one.keyword.decode(): (one.val or b"").decode() for one in found}
        self.name = address.name
        parameters = with_tls(address.parameters, defaults)

        self._mine = threading.local()

        def connect() -> Any:
            made = psycopg.connect(**parameters, prepare_threshold=None)
            self._mine.deadline.watch(made)
            return made

        self._engine: Engine = create_engine(
            "postgresql+psycopg://",
            creator=connect,
            hide_parameters=True,
            pool_size=_KEPT,
            max_overflow=16,
            pool_timeout=ANSWER_S,
            pool_use_lifo=True,
            use_native_hstore=False,
        )
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._closed = False

    def close(self) -> None:
        """Close the connections that are not in use; the others are closed after their use."""
        self._closed = True
        self._engine.dispose()

    def read(self, work: Callable[[Connection], _T]) -> _T:
        """Do a piece of work, each of its statements alone, on disk before it is done. Raises RemoteError."""
        return self._again(lambda: self._once(self._reading, work))

    def write(self, work: Callable[[Connection], _T]) -> _T:
        """Do a piece of work in one transaction, which is on disk afterwards. It may run more than once.

        Raises RemoteError; then the transaction may be done or not.
        """

        def surely(connection: Connection) -> _T:
            milliseconds = {"lock": str(LOCK_MS), "statement": str(int(ANSWER_S * 1e3))}
            connection.execute(_SURELY, milliseconds)
            return work(connection)

        def whole() -> _T:
            return self._once(self._engine, surely)

        return self._again(whole)

    def _once(self, engine: Engine, work: Callable[[Connection], _T]) -> _T:
        with _Deadline(ANSWER_S) as deadline:
            self._mine.deadline = deadline  # a new connection is watched from its first question on
            with engine.connect() as connection:
                deadline.watch(connection.connection.driver_connection)
                try:
                    done = work(connection)
                    connection.commit()
                    return done
                except BaseException:
                    with contextlib.suppress(SQLAlchemyError):
                        connection.rollback()
                    raise
                finally:
                    if self._closed:
                        connection.invalidate()
                    deadline.watch(None)  # it is another thread's from here on

    def _again(self, work: Callable[[], _T]) -> _T:
        """Do a piece of work again if another machine was in its way, and once if a kept connection had ended."""
        for attempt in range(_TRIES):
            try:
                return work()
            except DBAPIError as err:
                state = getattr(err.orig, "sqlstate", None)
                ended = err.connection_invalidated and attempt == 0
                if attempt == _TRIES - 1 or not (ended or state in _AGAIN):
                    raise self.error(err.orig, state) from None  # its text may have a row's
                time.sleep(_BUSY_S * attempt)
            except SQLAlchemyError as err:
                raise RemoteError(f"the remote {self.name} cannot be used: {type(err).__name__}") from None
        raise AssertionError

    def error(self, err: BaseException | None, state: str | None) -> RemoteError:
        """Return an error in words, without what a statement had."""
        said = getattr(getattr(err, "diag", None), "message_primary", None) or str(err)
        said = " ".join(said.split())[:300]
        why = _WORDS.get(state or "") or _WORDS.get((state or "")[:2])
        lasting = state is None and any(one in said for one in _LASTING)
        return RemoteError(
            f"the remote {self.name} cannot be used: {why or said}", lasting=lasting, refused=state in _REFUSED
        )


class _Deadline:
    """Ends the connection that is watched if the time is over: psycopg waits for an answer for ever. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._raw: Any = None
        self._over = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch(self, raw: Any) -> None:
        """Watch a connection of psycopg from now on, in place of the one before; None watches none."""
        with self._lock:
            self._raw = raw
            if self._over:
                self._cut()

    def _end(self) -> None:
        with self._lock:
            self._over = True
            self._cut()

    def _cut(self) -> None:
        if (raw := self._raw) is not None:
            with contextlib.suppress(Exception), socket.fromfd(raw.fileno(), socket.AF_INET, socket.SOCK_STREAM) as one:
                one.shutdown(socket.SHUT_RDWR)
