"""Tries an artifact on the Neural Engine in a process of its own: it may be killed there at the first prediction."""

from __future__ import annotations

import sys

from ssmd.probe import judge

COMMAND = (sys.executable, "-m", "ssmd_coreml.probe")

if __name__ == "__main__":
    from ssmd_coreml.runtime import CoreMLRuntime

    judge(CoreMLRuntime(probe=False))
