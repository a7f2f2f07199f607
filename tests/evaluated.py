"""Core ML played by the numpy evaluator of packages (tests/mil): all of the way to a Mac but Apple's execution.

As a program it is ssmd with Core ML played: python evaluated.py serve MODEL …
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ssmd.runtime.protocol import Runtime, get_runtime
from ssmd_coreml import runtime
from ssmd_coreml.backend import Function, Units

SSMD = (sys.executable, __file__)


class Evaluator:
    """A backend of CoreMLRuntime."""

    def problem(self) -> str:
        return ""

    def identity(self, units: Units) -> str:
        return f"evaluated with numpy, {units}"

    def load(self, package: Path, functions: tuple[str, ...], units: Units, build: str) -> dict[str, Function]:
        from mil.model import Model, open_package  # and with it coremltools and torch: 6 s of every process

        opened = open_package(package)
        return {name: Model(opened, name) for name in functions}


def runtime_of(name: str) -> Runtime:
    """As get_runtime; Core ML's with the evaluator."""
    return runtime.CoreMLRuntime(Evaluator()) if name == "coreml" else get_runtime(name)


def play(patch: Any) -> None:
    """Let get_runtime("coreml") be played, too. `patch` has pytest's setattr."""
    patch.setattr(runtime, "CoreML", Evaluator)


if __name__ == "__main__":
    from ssmd.cli import main

    setattr(runtime, "CoreML", Evaluator)  # noqa: B010 - for good, in a process of its own; mypy knows another type
    main()
