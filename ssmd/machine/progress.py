"""Stages of long work: what is done is announced, and afterwards how long it took and how much memory."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ssmd.machine.memory import most_resident, trim

Progress = Callable[[str], None]
Stage = Callable[[str], AbstractContextManager[None]]  # announces what is done inside, and then what it took

LOG_TAIL_BYTES = 2000  # of the words of libraries, shown when they fail


@contextmanager
def staged(progress: Progress, what: str) -> Iterator[None]:
    """Announces a stage, and when it is done its seconds and the most memory that the process has held so far."""
    progress(f"{what} …")
    begin = time.monotonic()
    with hushed():
        yield
    trim()
    peak = most_resident()
    memory = "" if peak is None else f", peak memory {peak / 2**30:.1f} GiB"
    progress(f"    {time.monotonic() - begin:.1f} s{memory}")


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
