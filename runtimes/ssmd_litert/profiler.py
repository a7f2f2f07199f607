"""A graph of LiteRT that reports, after a step, the operators that ran and the time of each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from ssmd_litert.library import LibraryGraph

_WORDS = 13  # of 64 bits in an event (LiteRtProfileEventData): a pointer to its name first, us fourth
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "LiteRtCompiledModelGetProfiler": (c_void_p, POINTER(c_void_p)),
    "LiteRtStartProfiler": (c_void_p,),
    "LiteRtStopProfiler": (c_void_p,),
    "LiteRtResetProfiler": (c_void_p,),
    "LiteRtGetNumProfilerEvents": (c_void_p, POINTER(c_int)),
    "LiteRtGetProfilerEvents": (c_void_p, c_int, c_void_p),
}
_NO_NODES = ("LiteRT::", "AllocateTensors", "TfLiteXNNPack", "Invoke")  # what such a name begins is a whole call
Node = tuple[str, int]  # its operator, and the us that it took


class ProfiledGraph(LibraryGraph):
    """A LibraryGraph whose steps are profiled, which costs each of them some time."""

    def options(self, threads: int, weight_cache: Path | None) -> dict[str, str]:
        texts = super().options(threads, weight_cache)
        return {**texts, "runtime_options_string": texts["runtime_options_string"] + "enable_profiling = true\n"}

    def nodes(self, step: Callable[[], object]) -> list[Node]:
        """Run a step. Returns its nodes in order.

        XNNPACK's operators are named in words, as `Add (ND)`, LiteRT's own in capitals, as `ADD`.
        """
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self.functions, name)
            function.argtypes, function.restype = arguments, c_int
        profiler, count = c_void_p(), c_int()
        self._call("LiteRtCompiledModelGetProfiler", self.compiled, ctypes.byref(profiler))
        self._call("LiteRtResetProfiler", profiler)
        self._call("LiteRtStartProfiler", profiler)
        step()
        self._call("LiteRtStopProfiler", profiler)
        self._call("LiteRtGetNumProfilerEvents", profiler, ctypes.byref(count))
        if not count.value:  # the step did not use this graph
            return []
        raw = np.zeros((count.value, _WORDS), np.uint64)
        self._call("LiteRtGetProfilerEvents", profiler, count.value, raw.ctypes.data)
        named = ((ctypes.string_at(int(event[0])).decode(), int(event[3])) for event in raw)
        return [(name, us) for name, us in named if not name.startswith(_NO_NODES)]
