"""Signals that come to a process which waits for its connections."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator


def on_hangup(do: Callable[[], None]) -> None:
    """Do that whenever SIGHUP comes; on Windows it never does."""
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, lambda *_: do())


@contextlib.contextmanager
def waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Meanwhile a signal wakes `loop`, which runs in the main thread, so that what handles it runs at once.

    A handler runs between two steps of the main thread. One that waits goes on waiting when the signal came just before
    that, or to another thread of the process. On Windows the loop sees to this itself.
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
