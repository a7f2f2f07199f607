"""The wgpu package: how it is imported, and its C functions without the wrapping.

A recorded dispatch costs 22 us through the wrappers and 3 us through these (docs/notes/log.md): a token takes hundreds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ssmd.machine.installation import broken
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.protocol import RuntimeUnavailable


def package_version() -> str:
    """Return the installed version of wgpu-py. Raises ImportError if it is not installed."""
    try:
        return version("wgpu")
    except PackageNotFoundError as err:
        raise ImportError("No module named 'wgpu'") from err


@cache
def wgpu() -> Any:
    """Import wgpu. Raises RuntimeUnavailable when it is installed and cannot be loaded."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Mesa's GL driver finds no display without it
    try:
        import wgpu
    except (ImportError, OSError, RuntimeError) as err:
        raise RuntimeUnavailable(broken("wgpu", err)) from err

    return wgpu


@cache
def native() -> tuple[Any, Any, Any]:
    """Return wgpu-native's lib and ffi, and the handler of its errors."""
    wgpu()
    from wgpu.backends.wgpu_native._api import error_handler, ffi, lib

    return lib, ffi, error_handler


@contextmanager
def raising(what: str) -> Iterator[None]:
    """Raise errors of C functions called inside as GraphError, instead of logging them."""
    handler = native()[2]
    handler.capture(what)
    try:
        yield
    finally:
        found = handler.release(what)
    if found is not None:
        raise GraphError(f"{what}: {found[1]}")
