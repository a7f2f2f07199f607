"""A daemon for one command, in its own process: the peer of `ssmd run` where none runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from pydantic import SecretStr

from ssmd import __version__
from ssmd.api.http import connections
from ssmd.app import create_app
from ssmd.config import Settings
from ssmd.daemon.discovery import Address
from ssmd.engine.host.opening import close_host, open_host
from ssmd.machine.network import listen_privately
from ssmd.machine.progress import show_progress
from ssmd.server import FLUSH_S, LINGER_S, SWITCH_S


@contextlib.contextmanager
def serving_here(settings: Settings, model: str | None, *, keep: bool) -> Iterator[Address]:
    """Serve in a thread, for this process alone, and yield the address. It handles no signals.

    Raises the errors of `open_host`.
    """
    sys.setswitchinterval(SWITCH_S)
    token = secrets.token_urlsafe(32)
    own = settings.model_copy(update={"api_key": SecretStr(token), "api_keys_file": None})
    with contextlib.ExitStack() as held:
        with show_progress(f"loading {model or 'the model'}"):
            host = open_host(settings, model, keep=keep)
        held.callback(close_host, host)
        host.ready()
        listening, address = _listen(held, token)
        app = create_app(host, own)
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=FLUSH_S, ws="none")
        connections.limit(config, connections.Limits.here())
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],), name="ssmd-here", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        try:
            yield address
        finally:
            host.shutdown(0)  # first, so that a client that still reads an answer gets its end
            server.should_exit = True
            thread.join(FLUSH_S + LINGER_S)


def _listen(held: contextlib.ExitStack, token: str) -> tuple[socket.socket, Address]:
    """Open a socket in a new folder that only this user can enter; without Unix sockets, a free port of loopback."""
    pid, now = os.getpid(), time.time()
    if sys.platform != "win32":
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="ssmd-")))  # of mode 0700
        with contextlib.suppress(OSError):  # its path may be too long for a socket's
            path = folder / "here.sock"
            listening = held.enter_context(listen_privately(path, connections.BACKLOG))
            return listening, Address(None, path, pid, __version__, now, token)
    listening = held.enter_context(socket.create_server(("127.0.0.1", 0)))
    return listening, Address(f"http://127.0.0.1:{listening.getsockname()[1]}", None, pid, __version__, now, token)
