"""The cost of refitting: seconds of one core and the most memory, for a source checkpoint and every graph that fits it.

    python benchmarks/refit.py FOLDER [--times N]

Each run is a process of its own on one core, and the source has been read before (it is in the page cache, as after a
download). *refit* writes the model's files; *install* is all of `ssmd pull`: refit, hashes of source and artifact, a
first load and 40 tokens, for which all cores may be used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ssmd.machine.memory import most_resident, resident
from ssmd.machine.processor import cpu_name
from ssmd.model.source import Source
from ssmd.refit import catalog
from ssmd.refit.refit import refit

MEASURES = ("refit_s", "refit_peak_mb", "install_s", "install_peak_mb", "file_mb", "before_mb")


def once(folder: Path, runtime: str, what: str) -> dict[str, float]:
    """Measure one refit or install in this process: seconds, peak memory and size, MB."""
    source = Source.open(folder)
    graph, why_not = catalog.choose_graph(source.config, [runtime])
    if graph is None:
        raise SystemExit(why_not)
    before = (resident() or 0) / 1e6
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        out = Path(scratch) / "out"
        begin = time.perf_counter()
        if what == "refit":
            os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
            out.mkdir()
            refit(graph, source, out)
        else:
            os.environ["SSMD_CACHE_DIR"] = scratch
            catalog.install(graph, source, out, name="measured")
        seconds, peak = time.perf_counter() - begin, (most_resident() or 0) / 1e6
        size = sum(f.stat().st_size for f in out.iterdir()) / 1e6
    return {f"{what}_s": seconds, f"{what}_peak_mb": peak, "file_mb": size, "before_mb": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--once", nargs=2, metavar=("RUNTIME", "WHAT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.once:
        print(json.dumps(once(asked.folder, *asked.once)))
        return
    for file in asked.folder.iterdir():
        file.read_bytes()
    print(f"{asked.folder.name}; {cpu_name()}, {os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}")
    print(f"medians of {asked.times}" + "".join(f"  {m:>15}" for m in MEASURES))
    for runtime in catalog.on_processor():
        runs: dict[str, list[float]] = {}
        for what in ("refit", "install") * asked.times:
            command = [sys.executable, __file__, str(asked.folder), "--once", runtime, what]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                runs.setdefault(name, []).append(value)
        print(f"{runtime:<12}" + "".join(f"  {statistics.median(runs[m]):>15.2f}" for m in MEASURES))


if __name__ == "__main__":
    main()
