"""coremltools, imported without its warnings, and the check of which parts of it work here."""

from __future__ import annotations

import logging
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ssmd.machine.installation import broken
from ssmd.runtime.protocol import RuntimeUnavailable

FIRST_MACOS = (15, 0)  # with states and with functions that share their weights


def coremltools() -> Any:
    """Import coremltools. Raises ImportError when it is not installed, RuntimeUnavailable when it cannot be loaded."""
    try:
        with quiet():
            return import_module("coremltools")
    except (ImportError, OSError) as err:
        if getattr(err, "name", None) == "coremltools" and isinstance(err, ModuleNotFoundError):
            raise
        raise RuntimeUnavailable(broken("coremltools", err)) from err


@contextmanager
def quiet() -> Iterator[None]:
    """Silence coremltools meanwhile. It warns of PyTorch's version, of macOS bindings, and of each int32 constant."""
    log = logging.getLogger("coremltools")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def package_version() -> str:
    """Return the installed version of coremltools. Raises ImportError when it is not installed."""
    try:
        return version("coremltools")
    except PackageNotFoundError as err:
        raise ImportError("coremltools is not installed") from err


def macos() -> tuple[int, ...] | None:
    """The version of macOS, (15, 1) on 15.1; None elsewhere."""
    if sys.platform != "darwin":
        return None
    return tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2] if part.isdecimal())
