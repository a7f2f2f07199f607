"""Runtimes: the names that a runtime outside of this repository needs, re-exported.

It needs no others to run, unless it follows a plan (docs/add-a-runtime.md).
"""

from ssmd.model.artifact import Artifact
from ssmd.model.state import Part, State, StateError, StateSpec
from ssmd.runtime.checked import CheckedHandle, CheckedProgram
from ssmd.runtime.info import BuildOption, RuntimeInfo, Target, runtime_names
from ssmd.runtime.protocol import (
    Device,
    Handle,
    Logits,
    Program,
    ProgramError,
    Runtime,
    RuntimeUnavailable,
    StateLost,
    check_threads,
    get_runtime,
)

__all__ = [
    "Artifact",
    "BuildOption",
    "CheckedHandle",
    "CheckedProgram",
    "Device",
    "Handle",
    "Logits",
    "Part",
    "Program",
    "ProgramError",
    "Runtime",
    "RuntimeInfo",
    "RuntimeUnavailable",
    "State",
    "StateError",
    "StateLost",
    "StateSpec",
    "Target",
    "check_threads",
    "get_runtime",
    "runtime_names",
]
