"""A chat in a real terminal: `ssmd run` in a pseudo-terminal of its own, typed to and read as a person would."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pexpect

PASTE, PASTED = "\x1b[200~", "\x1b[201~"  # as a terminal marks what is pasted
ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\x08\x00]")


class Terminal:
    """What is typed is kept by the terminal until it is read: nothing here waits for a prompt before it types."""

    def __init__(self, child: pexpect.spawn[str]) -> None:
        self.child = child

    def type(self, text: str) -> None:
        self.child.send(text)

    def line(self, text: str) -> None:
        self.type(text + ENTER)

    def until(self, wanted: str, timeout: float = 30) -> str:
        """What the terminal shows up to a regular expression, which matches what comes, escapes and all."""
        self.child.expect(wanted, timeout=timeout)
        return plain(f"{self.child.before}{self.child.after}")

    def end(self) -> str:
        """What is shown up to the end of the process."""
        return self.until(pexpect.EOF)


def plain(shown: str) -> str:
    return _ESCAPES.sub("", shown)


@contextmanager
def terminal(command: str, env: Mapping[str, str]) -> Iterator[Terminal]:
    """A shell command in a terminal; `$SSMD` in it is the command `ssmd`."""
    own = {**env, "TERM": "xterm", "SSMD": f"{sys.executable} -m ssmd"}
    child = pexpect.spawn("/bin/sh", ["-c", command], env=own, encoding="utf-8", dimensions=(60, 200), timeout=30)
    try:
        yield Terminal(child)
    finally:
        child.close(force=True)
