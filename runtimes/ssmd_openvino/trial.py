"""The trial of an artifact on a device in a process of its own. Arguments: WAY ARTIFACT DEVICE, a way of runtime.ways.

It is loaded twice. The first load compiles and keeps blobs (compile.py), and the second reads them, as later loads do.
The second is checked by golden values.
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
