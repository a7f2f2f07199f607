"""The tray's actions on a daemon. Each takes the data directory, and returns a message for the user.

Each raises DaemonError, which says what to do. All but `page` work over a socket as well as over a port.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ssmd.daemon import discovery
from ssmd.daemon.client import Client
from ssmd.daemon.discovery import Address, DaemonError
from ssmd.daemon.ending import end
from ssmd_tray import starting
from ssmd_tray.view import plain

_LOAD_S = 600.0  # a large model, or one that is tried first
_TICKET = re.compile(r"[A-Za-z0-9_.~-]{16,512}", re.ASCII)
_GONE = "request_not_found"
_one_at_a_time = threading.Lock()  # held while a daemon is started or ended, so that the last action decides


def stop_request(data_dir: Path, id_: str) -> str:
    """End an answer. Its text so far is kept."""
    client = _client(data_dir)
    try:
        client.send("POST", f"/ssmd/v1/requests/{quote(id_, safe='')}/stop")
    except DaemonError as err:
        if err.code == _GONE:
            return "that answer is over already"
        if err.status in (404, 405):
            raise DaemonError(f"{_version(client.address)} cannot stop a single answer") from err
        raise
    return "the answer was stopped"


def load(data_dir: Path, model: str) -> str:
    """Load a model; returns when it is there."""
    _client(data_dir, _LOAD_S).send("POST", _model(model, "/load"))
    return f"{plain(model)} is loaded"


def unload(data_dir: Path, model: str) -> str:
    """Unload a model once it has no requests."""
    row = _client(data_dir).send("POST", _model(model, "/unload"))
    gone = isinstance(row, dict) and row.get("state") == "unloaded"
    return f"{plain(model)} is not loaded any more" if gone else f"{plain(model)} is unloaded after its last request"


def pin(data_dir: Path, model: str, pinned: bool) -> str:
    """Pin a model, so that it stays once it is loaded, or unpin it."""
    _client(data_dir).send("PATCH", _model(model), {"pinned": pinned})
    return f"{plain(model)} {'stays once it is loaded' if pinned else 'is unloaded again when it is idle'}"


def page(data_dir: Path) -> str:
    """Return the address of the daemon's page, with a ticket that signs in once and within a minute."""
    client = _client(data_dir)
    if client.address.url is None:
        raise DaemonError("the daemon listens at a socket alone; the page needs a port: start it without --socket")
    try:
        answer: Any = client.send("POST", "/ssmd/v1/tickets", {})
    except DaemonError as err:
        if err.status in (404, 405):
            raise DaemonError(f"{_version(client.address)} has no page") from err
        raise
    ticket = answer.get("ticket") if isinstance(answer, dict) else None
    if not isinstance(ticket, str) or not _TICKET.fullmatch(ticket):
        raise DaemonError(f"what answers at {client.address.place} gives no ticket as a daemon of ssmd does")
    return f"{client.address.url}/#ticket={ticket}"


def start(data_dir: Path, url: str | None = None) -> str:
    """Start a daemon that serves the installed models. Returns when it answers.

    url: the last daemon's address; None if none was seen or it had no port. The new one takes its port, so that open
    pages find it again, or another port if that one is taken.
    """
    port = None if url is None else urlsplit(url).port
    with _one_at_a_time:
        if port is not None and _is_free(port):
            return _started(starting.start(data_dir, starting.usual(data_dir, port)))
        return _started(starting.start(data_dir, starting.usual(data_dir)))


def _is_free(port: int) -> bool:
    """Return True if a daemon can listen at a port of the loopback address."""
    with socket.socket() as one:
        if sys.platform != "win32":  # there it would bind beside the program that listens
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def stop(data_dir: Path) -> str:
    """End the daemon; returns when it has ended."""
    with _one_at_a_time:
        client = _client(data_dir)
        end(client, data_dir)
        return f"the daemon, process {client.address.pid}, has ended"


def restart(data_dir: Path) -> str:
    """End the daemon and start it again with the same command, if the system reports that."""
    with _one_at_a_time:
        client = _client(data_dir)
        command = starting.command_of(client.address.pid) or starting.usual(data_dir)
        end(client, data_dir)
        return _started(starting.start(data_dir, command))


def _client(data_dir: Path, timeout_s: float = 30.0) -> Client:
    found = discovery.find(data_dir)
    if found is None:
        raise DaemonError(f"no daemon answers on {data_dir}")
    return Client(found, timeout_s)


def _model(name: str, what: str = "") -> str:
    return f"/ssmd/v1/models/{quote(name, safe='@')}{what}"


def _started(address: Address) -> str:
    return f"the daemon answers at {address.place}, process {address.pid}"


def _version(address: Address) -> str:
    return f"this daemon, ssmd {address.version},"
