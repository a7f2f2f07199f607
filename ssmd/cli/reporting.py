"""Progress of a pull as lines for the daemon that started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

EACH_S = 0.2  # s between two reported lines of one stage
_BEHIND_OTHERS = 15  # priority, on the scale of nice


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Report the progress of all work inside as lines: {"stage", "done", "total", "unit"}, null if unknown.

    Such a process has a low priority. It ends as by Ctrl-C when the daemon closes its stdin, or is gone.
    """
    from ssmd.machine.processor import behind_others
    from ssmd.machine.progress import reported

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a daemon in the background may have it ignored
    behind_others(_BEHIND_OTHERS)
    news = _News(os.dup(1))  # a descriptor of its own: a stage holds stdout back
    threading.Thread(target=news.write_on, daemon=True).start()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with reported(news.tell):
        yield


class _News:
    """The last progress, until it is written."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._stage, self._line = "", b""

    def tell(self, stage: str, done: int, total: int, unit: str) -> None:
        """Take the progress of a stage. A new stage is written at once."""
        known = {"done": done if total else None, "total": total or None, "unit": unit or None}
        with self._lock:
            new, self._stage = stage != self._stage, stage
            self._line = json.dumps({"stage": stage, **known}).encode() + b"\n"
            if new:
                self._write()

    def write_on(self) -> None:
        """Write new progress every EACH_S, for ever."""
        while True:
            time.sleep(EACH_S)
            with self._lock:
                self._write()

    def _write(self) -> None:
        line, self._line = self._line, b""
        with contextlib.suppress(OSError):  # the daemon is gone, and this process ends in a moment
            os.write(self._out, line)


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    if sys.platform == "win32":
        import _thread

        _thread.interrupt_main()
    else:
        os.kill(os.getpid(), signal.SIGINT)
