"""Tries an artifact on a device in a process of its own. What it compiles is kept, as compile.py says, so that the load
that follows takes it from there."""

from __future__ import annotations

from ssmd.runtime.trial import judge
from ssmd_openvino.runtime import OpenVINORuntime

if __name__ == "__main__":
    judge(OpenVINORuntime(probe=False))
