"""A chat in a real terminal: `ssmd run` in a pseudo-terminal of its own, typed to and read as a person would."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import commands
import pexpect
from pexpect.fdpexpect import fdspawn

PASTE, PASTED = "\x1b[200~", "\x1b[201~"  # as a terminal marks what is pasted
ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
DIMENSIONS = 60, 200  # rows, columns
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\x08\x00]")


class Terminal:
    """A terminal that keeps typed text until it is read: no method waits for a prompt before it types."""

    def __init__(self, child: pexpect.spawn[str] | fdspawn[str]) -> None:
        self.child = child

    def type(self, text: str) -> None:
        self.child.send(text)

    def line(self, text: str) -> None:
        self.type(text + ENTER)

    def until(self, wanted: str, timeout: float = 30) -> str:
        """Return the terminal's text up to a regular expression, which matches the raw output, escapes included."""
        self.child.expect(wanted, timeout=timeout)
        return plain(f"{self.child.before}{self.child.after}")

    def end(self) -> str:
        """Return the text up to the end of the process."""
        return self.until(pexpect.EOF)


def plain(shown: str) -> str:
    return _ESCAPES.sub("", shown)


@contextmanager
def terminal(command: str, env: Mapping[str, str]) -> Iterator[Terminal]:
    """A shell command in a terminal; `$SSMD` in it is the command `ssmd`."""
    own = {**env, "TERM": "xterm", "SSMD": f"{sys.executable} -m ssmd"}
    child = pexpect.spawn(
        "/bin/sh", ["-c", command], env=own, encoding="utf-8", dimensions=DIMENSIONS, timeout=30, use_poll=True
    )
    try:
        yield Terminal(child)
    finally:
        child.close(force=True)


class _Paced(fdspawn):  # type: ignore[misc]  # pexpect has no types
    """Waits before it sends, as pexpect does with a process that it started."""

    delaybeforesend: float | None = 0.05

    def send(self, typed: str) -> int:
        time.sleep(self.delaybeforesend or 0)
        return int(super().send(typed))


@contextmanager
def command(*arguments: str, env: Mapping[str, str]) -> Iterator[Terminal]:
    """The command `ssmd` in a terminal, without a shell."""
    if sys.platform != "linux":
        with terminal(f"$SSMD {' '.join(arguments)}", env) as one:
            yield one
        return
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *DIMENSIONS, 0, 0))
    process = commands.start_in(theirs, *arguments, env={**env, "TERM": "xterm"})
    os.close(theirs)
    child = _Paced(ours, encoding="utf-8", timeout=30, use_poll=True)
    try:
        yield Terminal(child)
    finally:
        process.kill()
        process.wait()
        child.close()
