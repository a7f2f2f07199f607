"""Signals of a process that waits for connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator


def on_hangup(do: Callable[[], None]) -> None:
    """Call `do` whenever SIGHUP comes; on Windows it never comes."""
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, lambda *_: do())


def ignores_hangup() -> bool:
    """Return True if this process was started with SIGHUP ignored, as `nohup` starts one."""
    return sys.platform == "win32" or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def has_terminal() -> bool:
    """Return True if this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | getattr(os, "O_NOCTTY", 0)))
    except OSError:  # ENXIO: it never had one, or the terminal hung up
        return False
    return True


@contextlib.contextmanager
def waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let a signal wake `loop`, which runs in the main thread, so that the signal's handler runs at once.

    A handler runs between two steps of the main thread. A waiting main thread is not woken by a signal that came just
    before it began to wait, or to another thread. On Windows the loop does this by itself.
    """
    if sys.platform == "win32":
        yield
        return
    here, there = socket.socketpair()
    with here, there:
        for end in (here, there):
            end.setblocking(False)
        loop.add_reader(here, here.recv, 4096)
        before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(here)
