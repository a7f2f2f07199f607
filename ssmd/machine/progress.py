"""Stages of long work. Each is announced, and afterwards its time and memory are reported.

On a terminal a running stage is shown with its time so far, and with its progress if that is known.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from ssmd.machine import spelling
from ssmd.machine.memory import most_resident, trim

Progress = Callable[[str], None]
Stage = Callable[[str], AbstractContextManager[None]]  # announces a stage, and reports its time and memory at the end

Report = Callable[[str, int, int, str], None]  # (name of the stage, amount done, total or 0 if unknown, unit)

_reported: ContextVar[Report | None] = ContextVar("reported", default=None)
_shown: ContextVar[Callable[[int, int], None] | None] = ContextVar("shown", default=None)
REDRAWN_HZ = 5  # redraws per second: few, so as not to disturb the computation

LOG_TAIL_BYTES = 2000  # bytes of a library's output that are shown if it fails


@contextmanager
def staged(progress: Progress, what: str) -> Iterator[None]:
    """Announce a stage, and at its end report its seconds and the process's peak memory so far."""
    progress(f"{what} …")
    begin = time.monotonic()
    with show_progress(what, above=False), hushed():
        yield
    trim()
    peak = most_resident()
    memory = "" if peak is None else f", peak memory {peak / 2**30:.1f} GiB"
    progress(f"    {time.monotonic() - begin:.1f} s{memory}")


@contextmanager
def show_progress(what: str, *, above: bool = True) -> Iterator[None]:
    """Show a stage and its time so far on stderr, if that is a terminal. The display is removed at the end.

    Calls of `tell` add a bar and a percentage. above: text that is written to stderr meanwhile appears above it.
    """
    report = _reported.get()
    if _shown.get() is None and report is not None:
        report(what, 0, 0, "")
        before = _shown.set(lambda done, of: report(what, done, of, ""))
        try:
            yield
        finally:
            _shown.reset(before)
        return
    if _shown.get() is not None or not sys.stderr.isatty():  # one at a time
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # A duplicate descriptor, as `hushed` may redirect stderr meanwhile.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding, errors="replace") as terminal:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            TextColumn("{task.fields[percent]}", markup=False),
            TimeElapsedColumn(),
        )
        bar = Progress(
            *columns,
            console=Console(file=terminal),
            transient=True,
            refresh_per_second=REDRAWN_HZ,
            redirect_stdout=False,  # it may not be a terminal
            redirect_stderr=above,
        )
        with bar:
            task = bar.add_task(spelling.printable(what), total=None, percent="")
            last = -1

            def told(done: int, of: int) -> None:
                nonlocal last
                percent = min(100, 100 * done // of) if of > 0 else -1
                if percent != last:
                    last = percent
                    said = "" if percent < 0 else f"{percent} %"
                    bar.update(task, completed=max(0, percent), total=None if percent < 0 else 100, percent=said)

            before = _shown.set(told)
            try:
                yield
            finally:
                _shown.reset(before)


@contextmanager
def reported(to: Report) -> Iterator[None]:
    """Report the progress of stages inside to `to`, instead of showing it on a terminal."""
    before = _reported.set(to)
    try:
        yield
    finally:
        _reported.reset(before)


def report_to() -> Report | None:
    """Return the function of `reported` that gets the progress; None outside of `reported`."""
    return _reported.get()


def announce(what: str) -> None:
    """Report to the function of `reported` that a stage begins. Does nothing, and shows nothing, outside of it."""
    report = _reported.get()
    if report is not None:
        report(what, 0, 0, "")


def tell(done: int, of: int) -> None:
    """Report that `done` of `of` is done, in any unit, to the display or the function of `reported`.

    of: 0 if the total is not known any more. Does nothing if neither is in use.
    """
    told = _shown.get()
    if told is not None:
        told(done, of)


@contextmanager
def hushed() -> Iterator[None]:
    """Suppress all output to stdout and stderr, from C++ too. On an error the end of it goes to stderr after all.

    The converters write hundreds of lines about themselves, none of which helps a user.
    """
    with tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(log.fileno(), fd)
        failed = False
        try:
            yield
        except Exception:
            failed = True
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, original in zip((1, 2), kept, strict=True):
                os.dup2(original, fd)
                os.close(original)
            if failed:
                log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
                sys.stderr.write(log.read().decode(errors="replace"))
