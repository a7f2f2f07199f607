"""How a command fails: one line on stderr saying what was wrong and what to do. Exit codes: 0 ok, 1 error, 2 usage."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

INTERRUPTED = 130


@contextmanager
def plain_errors() -> Iterator[None]:
    """Exit 1 on the errors that ssmd itself raises and on those of the operating system; a bug keeps its traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as err:
        if not (type(err).__module__.startswith("ssmd") or isinstance(err, OSError)):
            raise
        fail(str(err))


def fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)
