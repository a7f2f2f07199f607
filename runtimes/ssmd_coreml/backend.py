"""The backends that execute packages: Core ML on a Mac, or another executor of the same format."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.cache import BUILD, cache_folder
from ssmd.runtime.hoststate.graph import Array, GraphError
from ssmd_coreml import library

log = logging.getLogger(__name__)
Units = Literal["gpu", "cpu", "ane"]
COMPUTE_UNITS: Mapping[Units, str] = {"gpu": "CPU_AND_GPU", "cpu": "CPU_ONLY", "ane": "CPU_AND_NE"}  # Core ML's names
NOT_HERE = "Core ML cannot execute here"


class StateStore(Protocol):
    """MLState: the states that a function reads and writes. Neither call while a prediction on it runs."""

    def read_state(self, name: str) -> NDArray[np.float32]:
        """Read a state into a new array, float32 whatever it is stored in."""

    def write_state(self, name: str, value: NDArray[np.float32]) -> None:
        """Copy `value`, which must be float32 and writeable, into a state."""


class Function(Protocol):
    """A loaded function of a package: coremltools' MLModel."""

    def predict(self, data: dict[str, Array], state: Any = None) -> dict[str, Array]:
        """Compute the outputs, in new arrays. Raises whatever Core ML raises."""

    def make_state(self) -> StateStore:
        """Return states of zeros, which every function of the package with the same states can use."""


class Backend(Protocol):
    def problem(self) -> str:
        """Return the reason why Core ML cannot execute here, with the remedy, or ""."""

    def identity(self, units: Units) -> str:
        """Name everything that, with the artifact, decides about every bit of a result."""

    def load(self, package: Path, functions: tuple[str, ...], units: Units, build: str) -> dict[str, Function]:
        """Load the functions of a package, by name. `build`: of the artifact. Raises GraphError."""


class CoreML:
    """Core ML by coremltools. The compiled model is kept in the cache folder for this artifact and system."""

    def problem(self) -> str:
        here = library.macos()
        if here is None:
            return (
                f"{NOT_HERE}: it is a part of macOS. Artifacts for it are built and checked on any system; serve them "
                "on a Mac with macOS 15 or later, and here another runtime's (ssmd list)"
            )
        if here < library.FIRST_MACOS:
            return (
                f"macOS {'.'.join(map(str, here))} is here, 15 or later is needed: states, and functions that share "
                "their weights, came with it. Update macOS, or use another runtime: --runtime litert"
            )
        return ""

    def identity(self, units: Units) -> str:
        return f"coremltools {library.package_version()}; {_system()}; {COMPUTE_UNITS[units]}"

    def load(self, package: Path, functions: tuple[str, ...], units: Units, build: str) -> dict[str, Function]:
        ct = library.coremltools()
        with library.quiet():
            compiled = _compiled(ct, package, build)
            try:
                unit = ct.ComputeUnit[COMPUTE_UNITS[units]]
                return {name: ct.models.CompiledMLModel(str(compiled), unit, name) for name in functions}
            except Exception as err:  # RuntimeError and plain Exception, as it comes from Core ML
                raise GraphError(f"Core ML cannot load it: {err}") from err


def compiled_path(build: str) -> Path:
    """Return the path of an artifact's compiled model for this system."""
    return system_folder(build) / "model.mlmodelc"


def system_folder(build: str) -> Path:
    """Return the folder of an artifact's cached files for this system, by its build."""
    return cache_folder() / "coreml" / build[:BUILD] / hashlib.sha256(_system().encode()).hexdigest()[:16]


def _compiled(ct: Any, package: Path, build: str) -> Path:
    """Return the compiled package. It is kept whole or not at all, and replaces other systems'. Raises GraphError."""
    kept = compiled_path(build)
    if kept.is_dir():
        return kept
    for other in kept.parent.parent.glob("*"):
        if other != kept.parent:
            shutil.rmtree(other, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = kept.with_name(f"fresh-{os.getpid()}.mlmodelc")
    try:
        ct.models.utils.compile_model(str(package), str(fresh))
        fresh.rename(kept)
    except Exception as err:
        shutil.rmtree(fresh, ignore_errors=True)
        if kept.is_dir():  # another process was faster
            return kept
        raise GraphError(f"Core ML cannot compile it: {err}") from err
    return kept


def _system() -> str:
    """Return the build of macOS, "macOS 24A335": Core ML may compute differently after an update."""
    try:
        done = subprocess.run(["/usr/bin/sw_vers", "-buildVersion"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no macOS"
    return f"macOS {done.stdout.strip()}"
