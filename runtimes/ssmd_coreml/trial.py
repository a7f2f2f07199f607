"""Tries an artifact on the Neural Engine in a process of its own: it may be killed there at the first prediction."""

from __future__ import annotations

import sys

from ssmd.runtime.trial import judge

COMMAND = (sys.executable, "-m", "ssmd_coreml.trial")

if __name__ == "__main__":
    from ssmd_coreml.runtime import CoreMLRuntime

    judge(CoreMLRuntime(probe=False))
