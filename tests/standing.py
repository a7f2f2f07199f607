"""This process in the place of a daemon: found as one, and answering in a few lines what no real one does at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving import serving
from starlette.applications import Starlette

from ssmd import __version__
from ssmd.daemon.discovery import Address, announce, withdraw
from ssmd.sessions.rows.lock import DirectoryLock

TOKEN = "t" * 43
AGE_S = 100.0
HOLDER = """
import sys, time, pathlib
from ssmd.sessions.rows.lock import DirectoryLock
held = DirectoryLock.take(pathlib.Path(sys.argv[1]), "wait")
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def held_elsewhere(data: Path) -> Iterator[int]:
    """A process that has a data directory locked, its number; it is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(data)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline().strip() == b"held"
            yield holder.pid
        finally:
            holder.kill()


@contextmanager
def found_at(
    data: Path, url: str | None, version: str = __version__, socket: Path | None = None, age_s: float = AGE_S
) -> Iterator[Address]:
    """The daemon of a data directory, which has run for `age_s` seconds."""
    data.mkdir(mode=0o700, exist_ok=True)
    lock = DirectoryLock.take(data, "wait")
    address = Address(url, socket, os.getpid(), version, time.time() - age_s, TOKEN)
    announce(data, address)
    try:
        yield address
    finally:
        withdraw(data)
        lock.release()


@contextmanager
def standing_in(data: Path, app: Starlette, version: str = __version__, age_s: float = AGE_S) -> Iterator[str]:
    """A server of a few lines in the place of a daemon; its URL."""
    with serving(app) as served, found_at(data, served.url, version, age_s=age_s):
        yield served.url
