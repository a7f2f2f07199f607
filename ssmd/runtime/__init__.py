"""Runtimes and what they stand on. The names of `protocol` can be imported from here, the one re-export: a runtime that
lives elsewhere needs no others."""

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
    runtime_names,
)

__all__ = [
    "Device",
    "Handle",
    "Logits",
    "Program",
    "ProgramError",
    "Runtime",
    "RuntimeUnavailable",
    "StateLost",
    "check_threads",
    "get_runtime",
    "runtime_names",
]
