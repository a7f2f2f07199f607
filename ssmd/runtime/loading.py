"""Loading an artifact: at once if it was made here, else after a trial load in a process of its own.

The parsers of vendors are C++ and trust a file's inner offsets. Hashes show damage, not origin.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from ssmd.machine import memory
from ssmd.machine.cache import cache_folder
from ssmd.machine.child import command
from ssmd.machine.confinement import allow_processor, confine, end_with
from ssmd.machine.duration import show_duration
from ssmd.machine.size import show_size
from ssmd.model.artifact import MANIFEST, Artifact, ArtifactError
from ssmd.runtime.info import info_of
from ssmd.runtime.protocol import Program, Runtime, get_runtime
from ssmd.runtime.trial import judge, probed

MEMORY = 16 << 30  # bytes of address space: files are mapped, packed and compiled, in pieces of unknown size
TIMES_FILES = 8  # more address space, in times of the artifact's bytes
# Bytes of memory that a trial on a processor may write, beside TIMES_FILES: a library that trusts a wrong count in a
# file of a few MB takes 100 MB a second. It needs 0.3 GB for small artifacts. Drivers of other devices may take more.
WRITABLE = 2 << 30
TIMES = 5  # trial loads: a parser that reads beyond its file crashes in every other process, by its memory's layout
SECONDS = 120.0  # longest trial load, beside the time by size
SECONDS_A_GIB = 120.0  # more time for each GiB, to hash, pack, and compute one text


def load(artifact: Artifact, *, made_here: bool, device: str | None = None, threads: int | None = None) -> Program:
    """Load an artifact. One that was not made here first needs a passed trial load, whose verdict is kept.

    Raises ArtifactError if the trial failed, and the errors of `Runtime.load`.
    """
    runtime = get_runtime(artifact.manifest.runtime)
    if not made_here:
        check_first_load(artifact, runtime, device)
    return runtime.load(artifact, device=device, threads=threads)


def check_first_load(artifact: Artifact, runtime: Runtime, device: str | None) -> None:
    """Check that a trial load passed here with this runtime's version. Raises ArtifactError."""
    device = device or artifact.manifest.device_class
    info = info_of(runtime.name)
    if info.parses_safely or device in info.tries:
        return
    digest = hashlib.sha256((artifact.path / MANIFEST).read_bytes()).hexdigest()
    version = getattr(runtime, "version", "")
    name = re.sub(r"[^0-9A-Za-z.-]", "_", f"{digest[:32]}-{runtime.name}-{version}-{device}")
    folder = cache_folder() / "first-loads" / name
    gib = sum(f.size for f in artifact.manifest.files.values()) / 2**30
    trial = command("ssmd.runtime.loading", str(os.getpid()))
    why, limit_s = f"{artifact.path} was not made here", SECONDS + SECONDS_A_GIB * gib
    verdict = probed(trial, artifact, device, folder, why, limit_s=limit_s, times=TIMES)
    tried = f"artifact {artifact.path} was not made here, was tried in a process of its own, and {verdict.why}"
    if verdict.accident:
        wait = show_duration(max(1, round(verdict.again_s)))
        raise ArtifactError(
            f"{tried}; the cause may be temporary: it is tried again after {wait}, or by another start of the daemon"
        )
    if not verdict.passed:
        raise ArtifactError(
            f"{tried}; it will not be used (remove {folder} to have it tried again); build it here, or pull it"
        )


def main() -> None:
    """Load an artifact within limits, and print the verdict on golden values. Arguments: PARENT ARTIFACT DEVICE."""
    end_with(int(sys.argv.pop(1)))
    artifact = Artifact.open(Path(sys.argv[1]))
    size = sum(f.size for f in artifact.manifest.files.values())
    writable = WRITABLE + TIMES_FILES * size if sys.argv[2] == "cpu" else None
    spare = memory.available()
    confine(MEMORY + TIMES_FILES * size, threads=True, writable=writable)
    allow_processor(16 * (SECONDS + SECONDS_A_GIB * size / 2**30))
    try:
        judge(get_runtime(artifact.manifest.runtime), bare=True)  # one that was made where its runtime cannot execute
    except MemoryError as err:
        if writable is None or spare is None or spare < writable:
            raise  # the machine may be short of memory, so the verdict is not kept
        raise ArtifactError(f"it takes more than {show_size(writable)} of memory") from err


if __name__ == "__main__":
    main()
