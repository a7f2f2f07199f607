"""Tries an artifact on the Neural Engine in a process of its own: it may be killed there at the first prediction."""

from __future__ import annotations

from ssmd.runtime.trial import judge
from ssmd_coreml.runtime import CoreMLRuntime

if __name__ == "__main__":
    judge(CoreMLRuntime(probe=False))
