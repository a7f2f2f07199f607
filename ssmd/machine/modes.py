"""The modes of a chat's terminal. They are restored at its end, and while Ctrl-Z has stopped it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

_PASTES, _NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"  # bracketed paste: marks stand around pasted lines


def draws() -> bool:
    """Return True if stdout is a terminal on which a prompt can be drawn; the shell of Emacs is not."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextlib.contextmanager
def quiet() -> Iterator[Callable[[], None]]:
    """Keep typed text for the next prompt, unechoed, while no prompt is shown.

    Yields a function that sets the modes again. It is needed as a process that continues in the background, and later
    comes back to the foreground, gets no signal.
    """
    if sys.platform == "win32":  # its console echoes only text that a program reads
        yield lambda: None
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent: list[Any] = [*before]
    silent[0] = before[0] & ~termios.ICRNL  # Enter comes as CR, as a prompt expects it
    silent[3] = before[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    silent[6] = [*before[6]]
    silent[6][termios.VMIN], silent[6][termios.VTIME] = 1, 0

    def put(modes: list[Any], escape: str = "") -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone
            if os.tcgetpgrp(descriptor) == os.getpgrp():  # a background process that sets the modes is stopped
                termios.tcsetattr(descriptor, termios.TCSANOW, modes)
                _write(escape)

    def stop(number: int, frame: Any) -> None:
        now = termios.tcgetattr(descriptor)  # the prompt's modes, if one is shown
        put(before, _NO_PASTES)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # returns when it goes on
        signal.signal(signal.SIGTSTP, stop)
        put(now, _PASTES)

    stops = signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
    if stops:
        signal.signal(signal.SIGTSTP, stop)
    put(silent)
    try:
        yield lambda: put(silent)
    finally:
        if stops:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        put(before, _NO_PASTES)  # even if a signal interrupted a prompt


@contextlib.contextmanager
def pasting() -> Iterator[None]:
    """Turn on bracketed paste meanwhile, so that text pasted during an answer stays one message."""
    if not draws():
        yield
        return
    _write(_PASTES)
    try:
        yield
    finally:
        _write(_NO_PASTES)


def _write(escape: str) -> None:
    os.write(sys.stdout.fileno(), escape.encode())  # print is not safe in a signal handler
