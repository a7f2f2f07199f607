"""Signals of a process that waits for connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType


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


def run_in_front(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command with this process's terminal until it ends. Return its exit code; 128 + n if signal n ended it.

    Signals that would end this process go to the command, which decides. A terminal's Ctrl-C comes to both, so that
    one is not sent again. Raises OSError if the command cannot be started.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and has_terminal():
            return
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    kept = {one: signal.getsignal(one) for one in numbers}
    try:
        for one, before in kept.items():
            if before != signal.SIG_IGN:  # `nohup` ignores SIGHUP for the command, too
                signal.signal(one, pass_on)
        process = subprocess.Popen(command, env=dict(environment))
        for number in early:
            process.send_signal(number)
        code = process.wait()
    finally:
        for one, before in kept.items():
            signal.signal(one, before)
    return code if code >= 0 else 128 - code
