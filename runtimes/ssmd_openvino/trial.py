"""Tries an artifact on a device in a process of its own: WAY ARTIFACT DEVICE, a way of runtime.ways.

It is loaded twice: what the first load compiles is kept, as compile.py says, and the second takes it from there, as
the load that follows does. Golden values judge the second.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ssmd.model.artifact import Artifact
from ssmd.runtime.trial import judge
from ssmd_openvino.runtime import OpenVINORuntime


def main() -> None:
    runtime = OpenVINORuntime(probe=False, weightless=sys.argv.pop(1) == "weightless")
    runtime.load(Artifact.open(Path(sys.argv[1])), device=sys.argv[2]).close()
    judge(runtime)


if __name__ == "__main__":
    main()
