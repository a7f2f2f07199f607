"""The daemon: a host of models behind HTTP, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from email.utils import formatdate
from functools import partial
from types import FrameType

import uvicorn

from ssmd import __version__
from ssmd.api.http import connections
from ssmd.api.http.access import AccessLog, Keys
from ssmd.config import Settings
from ssmd.daemon import discovery
from ssmd.daemon.discovery import Address
from ssmd.daemon.home import moved_in
from ssmd.daemon.logfile import OneLine
from ssmd.engine.host.host import Host
from ssmd.engine.host.opening import close_host, start_host
from ssmd.machine import network, signals
from ssmd.machine.confinement import forbid_core_dumps
from ssmd.machine.memory import return_big_blocks
from ssmd.machine.network import listen_privately, raise_limit
from ssmd.machine.size import show_size
from ssmd.model import aliases

log = logging.getLogger(__name__)
SWITCH_S = 0.0005  # longest time that one thread may keep another, such as the decoding one, from running
LOOK_S = 1  # time between two checks that commands still find the daemon, while a client is connected
ALONE_S = 60 if os.name == "posix" else LOOK_S  # the same while no client is: every check wakes the machine
GRACE_S = 10.0
QUIET_S = 5.0  # time without a request after which a daemon that drains stops: a balancer has noticed /health by then
DRAIN_LOOK_S = 0.05  # time between two looks for a request
STUCK_S = 10.0  # after GRACE_S: longest time that a step of the model may still take
FLUSH_S = 5
_TRIES = 16  # ports that are tried, until one is free at both loopback addresses
LINGER_S = 5.0  # after FLUSH_S: longest time that threads may still read requests, or write an export


class ServerError(RuntimeError):
    """The daemon cannot start; the message says what to change."""


def listen(settings: Settings) -> tuple[list[socket.socket], str]:
    """Return listening sockets, and their place as clients name it. Raises ServerError.

    Those of `also_listen` come last.
    """
    if settings.socket is not None:
        try:
            return [listen_privately(settings.socket, connections.BACKLOG)], f"the socket {settings.socket}"
        except OSError as err:
            raise ServerError(
                f"cannot listen at the socket {settings.socket}: {err.strerror or err}; or choose another with --socket"
            ) from err
    sockets = _listen_on(settings.host, settings.port)
    first = len(sockets)
    if settings.also_listen is not None:
        try:
            sockets += _listen_on(settings.host, settings.also_listen, "also_listen")
        except ServerError:
            for one in sockets:
                one.close()
            raise
    named = settings.host.lower() == "localhost"
    if _everywhere(settings.host) or (named and first == 1):  # a client cannot open it, or may reach another
        return sockets, f"{discovery.url_of(sockets)}/v1"
    return sockets, f"http://{network.bracketed(settings.host)}:{sockets[0].getsockname()[1]}/v1"


def _everywhere(host: str) -> bool:
    """Return True if a host stands for every address of this machine."""
    address = network.address(host)
    return address is not None and address.is_unspecified


def _listen_on(host: str, port: int, setting: str = "port") -> list[socket.socket]:
    """Return sockets that listen on every address of `host`, all at one port. Raises ServerError.

    setting: the one that chose the port.

    127.0.0.1 and localhost are both loopback addresses, IPv4's first: a client that opens localhost may mean either.
    """
    loopback = host.lower() in ("127.0.0.1", "localhost")
    for _ in range(_TRIES if loopback and port == 0 else 1):
        try:
            listening = _bind("127.0.0.1" if loopback else host, port)
        except OSError as err:
            reason = os.strerror(err.errno) if err.errno and err.errno > 0 else str(err)
            other = "choose another with --port" if setting == "port" else "leave --also-listen out"
            raise ServerError(f"cannot listen on {host} port {port}: {reason}; stop what uses it, or {other}") from err
        if not loopback:
            return listening
        chosen = listening[0].getsockname()[1]
        try:
            return listening + _bind("::1", chosen)
        except OSError as err:
            taken = err.errno == errno.EADDRINUSE
            if taken and port == 0:  # another free port may be free at both
                listening[0].close()
                continue
            level = logging.WARNING if taken else logging.INFO
            why = "another process listens there" if taken else err.strerror or str(err)
            log.log(
                level, "cannot listen at [::1]:%d, %s: open http://127.0.0.1:%d, not localhost", chosen, why, chosen
            )
            return listening
    raise ServerError(
        f"cannot listen on {host}: found no port that is free at 127.0.0.1 and ::1; choose one with --port"
    )


def _bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address of `host`. Raises OSError."""
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
    except OSError:
        for one in listening:
            one.close()
        raise
    return listening


def serve(
    settings: Settings,
    model: str | None,
    *,
    keep: bool = True,
    announce: Callable[[str], None] = print,
    run: str = "ssmd run",
    browse: bool = False,
) -> None:
    """Serve until SIGINT, SIGTERM or `ssmd stop`. Raises the errors of `open_host`, ServerError and DaemonError.

    While the first models load, requests for them wait, and /health reports the load. A signal then ends the process.
    run: the command line, up to the model's name, that reaches this daemon from a terminal. browse: open the page once
    the daemon is ready.
    """
    return_big_blocks()
    sys.setswitchinterval(SWITCH_S)
    raise_limit()
    if not settings.core_dumps:
        forbid_core_dumps()
    settings.check_exposure()
    token = secrets.token_urlsafe(32)
    keys = Keys.of(settings, token)
    hangup = _Hangup(keys if settings.api_keys_file is not None else None)
    home, leaving = None, contextlib.ExitStack()
    if keep:
        discovery.check_alone(settings.data_dir)
    sockets: list[socket.socket] = []
    try:
        if keep:
            settings.prepare()
            home = leaving.enter_context(moved_in(settings.data_dir))
        sockets, place = listen(settings)  # after the log file is open, as stderr may be unread
        host, first = start_host(settings, model, keep=keep, lazy=True)
    except BaseException:
        leaving.__exit__(*sys.exc_info())
        for one in sockets:
            one.close()
        raise

    from ssmd.app import create_app  # it takes half a second, while the first model loads

    async def look() -> None:
        if home is not None:
            home.look()
        host.look()

    access = AccessLog.of(settings)
    config = uvicorn.Config(
        create_app(host, settings, keys, access=access, end=lambda: server.drain()),
        access_log=False,
        callback_notify=look,
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_S,
        timeout_notify=0,  # at each tick of the main loop
        ws="none",
    )
    connections.limit(config, connections.Limits.here(), first=lambda: server.awake())

    def ready() -> None:
        gc.enable()
        gc.freeze()  # all objects so far stay; collecting them takes 70 ms, and stops decoding
        hangup.end = server.drain
        host.ready()
        said = f"ssmd {__version__} serves {_served(host, model)} at {place}"
        url = discovery.url_of(sockets) if settings.socket is None else None
        if home is not None:
            home.ready(Address(url, settings.socket, os.getpid(), __version__, time.time(), token), said)
        ways = _ways(host, settings, url, run if keep else None)
        announce("\n".join([said, *(f"  {where:18} {way}" for where, way in ways)]))
        if browse and url is not None:
            threading.Thread(target=_open_page, args=(f"{url}/",), name="ssmd-browser", daemon=True).start()

    for alias in aliases.parse(settings.aliases):
        if host.shelf.preferred(alias.model) is None:
            log.warning(
                "the alias %s is in vain: no model %s can be used here; `ssmd list` names them", alias, alias.model
            )
    server = _Server(config, host, first, ready, settings.drain)
    if host.writer is not None and settings.api_keys_file is not None:
        writer = host.writer
        hangup.changed = lambda: writer.drop_sealed_of_others({"", *keys.names})
        hangup.changed()  # a key may have gone while no daemon ran
    try:
        server.run(sockets=sockets)
        if server.failure is not None:
            raise server.failure
    finally:
        if access is not None:
            access.close()
        close_host(host)
        leaving.__exit__(*sys.exc_info())


def _served(host: Host, model: str | None) -> str:
    """Return the startup line's list of models: the named one, or all of them with the memory budget."""
    there = host.shelf.models()
    if model is not None and len(there) == 1 and (m := there[0].found.manifest) is not None:
        return f"{there[0].name} ({m.runtime}, {m.device_class}, {m.quantization})"
    names = ", ".join(sorted({model.name for model in there}))
    budget = "" if host.budget is None else f"; {show_size(host.budget)} of memory for those that are loaded"
    return f"{names} (loaded when asked for{budget})"


def _ways(host: Host, settings: Settings, url: str | None, run: str | None) -> list[tuple[str, str]]:
    """Return the ways to reach the daemon: pairs of a place and the URL or command to use there.

    url: the daemon's; None if it listens at a socket. run: as `serve` takes it; None: no command finds the daemon.
    """
    ways = [] if url is None else [("in a browser:", f"{url}/")]
    if url is not None and settings.also_listen is not None:
        ways.append(("as Ollama:", f"{url.rpartition(':')[0]}:{settings.also_listen}"))
    there = [model for model in host.shelf.models() if model.found.manifest is not None and not model.found.problem]
    names = sorted({model.name for model in there})
    if run is not None and names:
        ways.append(("in a terminal:", f"{run} {names[0]}"))
    if url is not None and not settings.loopback:
        port = url.rpartition(":")[2]
        ways.append(("from elsewhere:", f"http://{_reachable(settings.host)}:{port}/  (the page asks for the key)"))
    return ways


def _reachable(host: str) -> str:
    """Return the host name or address in a URL by which other machines reach `host`. Sends no packet."""
    if not _everywhere(host):
        return network.bracketed(host)
    family, outside = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect((outside, 9))  # on a datagram socket this only looks up the route
        return network.bracketed(one.getsockname()[0])
    return socket.gethostname()


def _open_page(url: str) -> None:
    """Open the page in the user's browser. Log a warning if there is none; the daemon serves all the same."""
    import webbrowser

    try:
        opened = webbrowser.open(url)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        log.warning("no browser could be opened here: open %s in one", url)


class _Hangup:
    """The response to SIGHUP: it reads the keys again, or ends the daemon as SIGTERM does.

    It ends a daemon without a keys file, and one whose terminal is gone. It never ends one that `nohup` started. A
    terminal that closes may send it twice, so a second one changes nothing.
    """

    def __init__(self, keys: Keys | None) -> None:
        """keys: those of a file; None if there is no file."""
        self.end: Callable[[], object] = partial(os._exit, 129)  # 128 + SIGHUP; until there is a server to drain
        self.changed: Callable[[], object] = lambda: None  # called after the keys were read
        self._keys = keys
        self._stays, self._terminal = signals.ignores_hangup(), signals.has_terminal()
        if keys is not None or not self._stays:
            # In a thread: the signal may come in the middle of a log call.
            signals.on_hangup(lambda: threading.Thread(target=self._answer, name="ssmd-hangup", daemon=True).start())

    def _answer(self) -> None:
        if self._keys is not None:
            self._keys.reread()
            self.changed()
        gone = self._terminal and not signals.has_terminal()
        if self._stays or (self._keys is not None and not gone):
            return
        why = ", because the terminal is gone" if gone else ""
        log.warning("SIGHUP: finishing requests, at most %.0f s%s", GRACE_S, why)
        self.end()


def start_logging(level: str) -> None:
    """Log to stderr from `level` on; from libraries, warnings and worse only, unless `level` is debug."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":
        for library in ("alembic", "asyncio", "httpx2", "uvicorn.error"):
            logging.getLogger(library).setLevel(logging.WARNING)


class _Server(uvicorn.Server):
    """Drains at a signal: running requests finish, new ones get 503. A second signal ends the process at once.

    So does the first one while the first models load. failure: the error of that load, which ended the server.
    """

    def __init__(
        self, config: uvicorn.Config, host: Host, first: Future[None], ready: Callable[[], None], drain_s: float
    ) -> None:
        """first: the load of the first models. ready: called in the event loop once they are loaded.

        drain_s: longest time that requests are still answered at the end, while /health is 503.
        """
        super().__init__(config)
        self._drain_s = drain_s
        self.failure: BaseException | None = None
        self._host = host
        self._first, self._ready = first, ready
        self._draining = False
        self._woken = asyncio.Event()
        self._wake: Callable[[], object] = lambda: None

    async def main_loop(self) -> None:
        """Tick every LOOK_S while a client is connected, every ALONE_S while none is, and when woken.

        uvicorn's own loop wakes an idle machine ten times a second.
        """
        loop = asyncio.get_running_loop()
        self._wake = partial(loop.call_soon_threadsafe, self._woken.set)
        with signals.waking(loop):
            while not await self.on_tick(0):
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), LOOK_S if self.server_state.connections else ALONE_S)

    def awake(self) -> None:
        """Tick at once because a first client connected. Its answer gets the time of now, not of the last tick."""
        now = formatdate(usegmt=True).encode()
        self.server_state.default_headers = [(b"date", now), *self.config.encoded_headers]
        self._woken.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        connections.hold(sockets or ())
        loop = asyncio.get_running_loop()

        def loaded(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the server ended meanwhile
                loop.call_soon_threadsafe(self._loaded)

        self._first.add_done_callback(loaded)

    def _loaded(self) -> None:
        """Become ready, or end with the error of the load."""
        if self._draining:
            return
        try:
            self._first.result()
            self._ready()
        except BaseException as err:
            self.failure = err
            self.should_exit = True
            self._wake()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining or not self._first.done():
            os._exit(128 + sig)
        notice = (
            f"{signal.Signals(sig).name}: finishing requests, at most {self._drain_s + GRACE_S:.0f} s; "
            "a second one stops at once\n"
        )
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(sys.stderr.fileno(), notice.encode())  # print is not safe in a signal handler
        self.drain()

    def drain(self) -> None:
        """Let running requests finish, then end the server. Idempotent."""
        if not self._draining:
            self._draining = True
            threading.Thread(target=self._drain, name="ssmd-shutdown", daemon=True).start()

    def _leave(self) -> None:
        """Answer requests while /health is 503: until none came for QUIET_S, or the drain's time is over."""
        self._host.leaving = True
        ends = quiet = time.monotonic()
        ends += self._drain_s
        while (now := time.monotonic()) < min(ends, quiet + QUIET_S):
            if self._host.busy:
                quiet = now
            time.sleep(min(DRAIN_LOOK_S, ends - now))

    def _drain(self) -> None:
        if self._drain_s:
            self._leave()
        stuck = threading.Timer(GRACE_S + STUCK_S, self._give_up)
        stuck.daemon = True
        stuck.start()
        try:
            self._host.shutdown(GRACE_S)
        except Exception:
            log.exception("the host did not stop cleanly")
        finally:
            stuck.cancel()
            last = threading.Timer(FLUSH_S + LINGER_S, _stop_without_threads)
            last.daemon = True
            last.start()
            self.should_exit = True
            self._wake()

    def _give_up(self) -> None:
        """Kill this process if its model hangs in a step. No thread can stop it, and the store survives a kill."""
        if self._host.working:
            log.error("the model did not come back from a step within %.0f s: stopping without it", GRACE_S + STUCK_S)
            os._exit(1)


def _stop_without_threads() -> None:
    """Kill this process if threads still run after its last answer. Nothing else stops them; the store survives it."""
    log.warning("threads of ended requests did not end: stopping without them")
    os._exit(0)
