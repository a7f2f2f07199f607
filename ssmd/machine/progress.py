"""Stages of long work: what is done is announced, and afterwards how long it took and how much memory; on a terminal it
is shown meanwhile, for how long it has been done, and how much of it where that is known."""

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
Stage = Callable[[str], AbstractContextManager[None]]  # announces what is done inside, and then what it took

Report = Callable[[str, int, int, str], None]  # what is done, how much, of how much (0: unknown), in which unit

_reported: ContextVar[Report | None] = ContextVar("reported", default=None)
_shown: ContextVar[Callable[[int, int], None] | None] = ContextVar("shown", default=None)
REDRAWN_HZ = 5  # how often: what computes meanwhile is to be disturbed little

LOG_TAIL_BYTES = 2000  # of the words of libraries, shown when they fail


@contextmanager
def staged(progress: Progress, what: str) -> Iterator[None]:
    """Announces a stage, and when it is done its seconds and the most memory that the process has held so far."""
    progress(f"{what} …")
    begin = time.monotonic()
    with shown(what, above=False), hushed():
        yield
    trim()
    peak = most_resident()
    memory = "" if peak is None else f", peak memory {peak / 2**30:.1f} GiB"
    progress(f"    {time.monotonic() - begin:.1f} s{memory}")


@contextmanager
def shown(what: str, *, above: bool = True) -> Iterator[None]:
    """Shows on stderr, where that is a terminal, what is done inside and for how long; with what `tell` is told, a bar
    and how many percent. It goes again at the end. `above`: whether what is written to stderr stands above it."""
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

    # A descriptor of its own: that of stderr may be kept back meanwhile.
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
            redirect_stdout=False,  # it may be no terminal
            redirect_stderr=above,
        )
        with bar:
            task = bar.add_task(spelling.shown(what), total=None, percent="")
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
    """Has what is done inside told to `to`, and not shown on a terminal."""
    before = _reported.set(to)
    try:
        yield
    finally:
        _reported.reset(before)


def report_to() -> Report | None:
    """What is to be told how much is done, where that is not a terminal."""
    return _reported.get()


def tell(done: int, of: int) -> None:
    """Tell whoever watches how much of what is being done is done, in any unit; `of` 0: that is not known any more. It
    costs nothing where nobody does."""
    told = _shown.get()
    if told is not None:
        told(done, of)


@contextmanager
def hushed() -> Iterator[None]:
    """Keeps back what is written to stdout and stderr, from C++ too; on an error its end goes to stderr after all.

    The converters write hundreds of lines about themselves, none of which tells a user what to do.
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
