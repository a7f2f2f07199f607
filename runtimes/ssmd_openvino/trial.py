"""Tries an artifact on a device in a process of its own. What it compiles is kept, as compile.py says, so that the load
that follows takes it from there."""

from __future__ import annotations

import sys

from ssmd.runtime.trial import judge

COMMAND = (sys.executable, "-m", "ssmd_openvino.trial")

if __name__ == "__main__":
    from ssmd_openvino.runtime import OpenVINORuntime

    judge(OpenVINORuntime(probe=False))
