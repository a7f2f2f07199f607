"""The daemon: an engine behind HTTP. `create_app` builds the app, `serve` runs it until a signal ends it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ssmd import __version__
from ssmd.api import chat, connections, health, metrics, models, sessions
from ssmd.api.keys import Keys
from ssmd.api.security import Rules, guarded
from ssmd.config import Settings
from ssmd.engine.engine import Engine
from ssmd.engine.lanes import affordable
from ssmd.engine.metrics import Metrics
from ssmd.installed import resolve
from ssmd.machine.descriptors import raise_limit
from ssmd.machine.memory import return_big_blocks
from ssmd.machine.privatesocket import listen_privately
from ssmd.machine.size import show_size
from ssmd.model.artifact import Artifact
from ssmd.model.made import is_made_here
from ssmd.runtime.loading import load
from ssmd.sessions.rows.lock import DirectoryLock
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

log = logging.getLogger(__name__)
SWITCH_S = 0.0005  # for which one thread may keep the others, of which one decodes, from running
STALL_S = 30.0
GRACE_S = 10.0
STUCK_S = 10.0  # for which, after that, a step of the model may go on
FLUSH_S = 5
LINGER_S = 5.0  # for which, after that, threads may go on that read what was asked, or write an export
MAX_LINE_CHARS = 4000  # of the log


class ServerError(RuntimeError):
    """The daemon cannot start; the message says what to change."""


def create_app(
    engine: Engine, store: Store | None, settings: Settings, keys: Keys | None = None, *, stall_s: float = STALL_S
) -> ASGIApp:
    """The ASGI app. keys: default: those of the settings. `stall_s`: how long a client may leave its answer unread
    before it is given up. Raises SettingsError.
    """
    routes = [
        *chat.routes(engine, stall_s, truncate=settings.truncation == "auto"),
        *models.routes(engine),
        *health.routes(engine),
        *metrics.routes(engine, store),
        *sessions.routes(engine, store),
    ]
    rules = Rules.of(settings, Keys.of(settings) if keys is None else keys, body_limits=sessions.BODY_LIMITS)
    return guarded(routes, rules)


def open_engine(settings: Settings, model: str | None, *, keep: bool) -> tuple[Engine, Store | None]:
    """Load a model and start its engine. `keep` False: no store, nothing is written down.

    Raises ModelError, ArtifactError, RuntimeUnavailable, ProgramError, StoreError or SettingsError.
    """
    artifact = Artifact.open(resolve(model, settings.models_dir, settings.runtime, settings.device))
    made_here = is_made_here(artifact.path, settings.data_dir)
    program = load(artifact, made_here=made_here, device=settings.device, threads=settings.threads)
    store = None
    if keep:
        settings.prepare()
        store = Store.open(settings.data_dir, quota=settings.quota)
        store.room.reserve()
        _within_quota(store)
    numbers = Metrics()
    numbers.loaded(artifact.manifest.name)
    max_running, spare_lanes = affordable(program.spec, program.context, settings.max_running)
    engine = Engine(
        artifact,
        program,
        store,
        metrics=numbers,
        max_running=max_running,
        spare_lanes=spare_lanes,
        max_queue=settings.max_queue,
        apart=not made_here,
    )
    engine.start(warm_up=True)
    return engine, store


def _within_quota(store: Store) -> None:
    """The quota may have been larger yesterday. A store that is busy is brought down by its next commit."""
    if store.quota is None or store.bytes_stored() <= store.quota:
        return
    try:
        done = store.collect()
    except StoreError as err:
        log.warning("the store could not be brought within its quota: %s", err)
        return
    log.warning(
        "the quota of %s is exceeded: %d checkpoints of %d sessions were let go, %s; %s are left",
        *(show_size(store.quota), done.checkpoints, len(done.sessions), show_size(done.nbytes), show_size(done.left)),
    )


def listen(settings: Settings) -> tuple[list[socket.socket], str]:
    """Sockets that listen, and how clients name their place. Raises ServerError."""
    if settings.socket is not None:
        try:
            return [listen_privately(settings.socket, connections.BACKLOG)], f"the socket {settings.socket}"
        except OSError as err:
            raise ServerError(
                f"cannot listen at the socket {settings.socket}: {err.strerror or err}; or choose another with --socket"
            ) from err
    sockets = _listen_on(settings.host, settings.port)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return sockets, f"http://{host}:{sockets[0].getsockname()[1]}/v1"


def _listen_on(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`."""
    listening: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            listening.append(one)
            if os.name == "posix":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            one.listen(connections.BACKLOG)
            port = one.getsockname()[1]  # 0 becomes one port for all addresses
    except OSError as err:
        for one in listening:
            one.close()
        reason = os.strerror(err.errno) if err.errno and err.errno > 0 else str(err)
        raise ServerError(
            f"cannot listen on {host} port {port}: {reason}; stop what uses it, or choose another with --port"
        ) from err
    return listening


def serve(
    settings: Settings,
    model: str | None,
    *,
    keep: bool = True,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises what `open_engine` raises, and ServerError."""
    return_big_blocks()
    sys.setswitchinterval(SWITCH_S)
    raise_limit()
    settings.check_exposure()
    keys = Keys.of(settings)
    if settings.api_keys_file is not None:
        _reread_on_hangup(keys)
    lock = None
    sockets, place = listen(settings)
    try:
        if keep:
            settings.prepare()
            lock = DirectoryLock.take(settings.data_dir, "use it, stop it, or choose another directory with --data-dir")
        engine, store = open_engine(settings, model, keep=keep)
    except BaseException:
        if lock is not None:
            lock.release()
        for one in sockets:
            one.close()
        raise
    manifest = engine.artifact.manifest
    config = uvicorn.Config(
        create_app(engine, store, settings, keys),
        access_log=False,
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_S,
        ws="none",
    )
    connections.limit(config, connections.Limits.here())

    def ready() -> None:
        gc.freeze()  # what is there by now stays: to look through all of it takes 70 ms, during which no token comes
        announce(
            f"ssmd {__version__} serves {manifest.name} ({manifest.runtime}, {manifest.device_class}, "
            f"{manifest.quantization}) at {place}"
        )

    try:
        _Server(config, engine, ready).run(sockets=sockets)
    finally:
        engine.shutdown(0)
        engine.program.close()
        if store is not None:
            store.close()
        if lock is not None:
            lock.release()


def _reread_on_hangup(keys: Keys) -> None:
    """Read the keys again whenever SIGHUP comes; in a thread, as a signal may come in the middle of a log line."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(
            signal.SIGHUP, lambda *_: threading.Thread(target=keys.reread, name="ssmd-keys", daemon=True).start()
        )


def start_logging(level: str) -> None:
    """Log to stderr from `level` on; from libraries, warnings and worse only, unless `level` is debug."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":
        for library in ("alembic", "asyncio", "httpx2", "uvicorn.error"):
            logging.getLogger(library).setLevel(logging.WARNING)


class OneLine(logging.Formatter):
    """A line for each record, and what follows of an error behind a mark: nothing that a client sends becomes a line of
    its own, steers a terminal or fills a disk.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _plain(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _behind(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _behind(super().formatStack(stack_info))


def _behind(text: str) -> str:
    return "\n".join(f"  | {_plain(line)}" for line in text.split("\n"))


def _plain(text: str) -> str:
    """The text with everything escaped that is not to be seen, and cut where it is longer than anybody reads."""
    text = text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Server(uvicorn.Server):
    """Goes on answering (503 for new requests) while the running ones come to their end; a second signal ends all."""

    def __init__(self, config: uvicorn.Config, engine: Engine, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine = engine
        self._ready = ready
        self._draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        connections.hold(sockets or ())
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining:
            os._exit(128 + sig)
        self._draining = True
        notice = f"{signal.Signals(sig).name}: finishing what runs, at most {GRACE_S:.0f} s; once more stops at once\n"
        with contextlib.suppress(OSError):  # a terminal that is gone is no reason not to stop
            os.write(sys.stderr.fileno(), notice.encode())  # print is not safe in a signal handler
        threading.Thread(target=self._drain, name="ssmd-shutdown", daemon=True).start()

    def _drain(self) -> None:
        stuck = threading.Timer(GRACE_S + STUCK_S, self._give_up)
        stuck.daemon = True
        stuck.start()
        try:
            self._engine.shutdown(GRACE_S)
        except Exception:
            log.exception("the engine did not stop cleanly")
        finally:
            stuck.cancel()
            last = threading.Timer(FLUSH_S + LINGER_S, _stop_without_threads)
            last.daemon = True
            last.start()
            self.should_exit = True

    def _give_up(self) -> None:
        """End a process whose model does not come back: no thread can end it, and the store survives a kill."""
        if self._engine.working:
            log.error("the model did not come back from a step within %.0f s: stopping without it", GRACE_S + STUCK_S)
            os._exit(1)


def _stop_without_threads() -> None:
    """End a process that answers nobody any more and waits for threads, which nothing ends. The store survives it."""
    log.warning("what was read for requests that are over did not end: stopping without it")
    os._exit(0)
