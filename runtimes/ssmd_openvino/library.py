"""The packages of OpenVINO, imported without their telemetry.

`import openvino` sends a report to its makers over the network, in a thread, unless a file in the home folder forbids
it or `openvino_telemetry` is not installed. nncf does the same.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from ssmd.machine.installation import broken
from ssmd.runtime.protocol import RuntimeUnavailable


def openvino() -> Any:
    """Import openvino. Raises ImportError when it is not installed, RuntimeUnavailable when it cannot be loaded."""
    _hush()
    try:
        return import_module("openvino")
    except (ImportError, OSError) as err:
        if getattr(err, "name", None) == "openvino" and isinstance(err, ModuleNotFoundError):
            raise
        raise RuntimeUnavailable(broken("openvino", err)) from err


def nncf() -> Any:
    _hush()
    os.environ.setdefault("NNCF_CI", "1")  # no telemetry
    return import_module("nncf")


def package_version() -> str:
    """Return the installed version of openvino. Raises ImportError when it is not installed."""
    try:
        return version("openvino")
    except PackageNotFoundError as err:
        raise ImportError("openvino is not installed") from err


def _hush() -> None:
    absent: dict[str, ModuleType | None] = {"openvino_telemetry": None}  # an import of it raises ImportError
    sys.modules.update(absent)  # type: ignore[arg-type] # as documented for sys.modules
