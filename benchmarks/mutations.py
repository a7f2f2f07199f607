"""Ten ways of breaking the code, and the test of the default set that sees each: python benchmarks/mutations.py

Each is made in a copy of the checkout, and its test must fail there; all of these tests must pass in the copy before.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in `file`, becomes `new`; `test` fails."""

    area: str
    what: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = (
    Mutation(
        *("state", "a new handle finds the state of the last conversation", "ssmd/runtime/hoststate/slot.py"),
        *("        self.arenas[0].fill(0)", "        pass"),
        "contract/test_handles.py::test_memory_of_a_released_handle_brings_nothing_with_it[litert-mamba-f32]",
    ),
    Mutation(
        *("state", "a clone copies the arena that the last step read", "ssmd/runtime/hoststate/program.py"),
        *(
            "np.copyto(twin.slot.arenas[0], handle.slot.arenas[handle.side])",
            "np.copyto(twin.slot.arenas[0], handle.slot.arenas[0])",
        ),
        "contract/test_handles.py::test_a_clone_goes_its_own_way[openvino-granite-f32]",
    ),
    Mutation(
        *("store", "states are read without their checksums", "ssmd/sessions/rows/parts.py"),
        *("if not is_genuine(blob.data, blob.checksum):", "if False:"),
        "sessions/test_faults.py",
    ),
    Mutation(
        *("store", "rows go that another checkpoint still needs", "ssmd/sessions/rows/checkpoints.py"),
        *("unused = (segment.c.id.in_(part), segment.c.id.not_in(used))", "unused = (segment.c.id.in_(part),)"),
        "sessions/test_forks.py",
    ),
    Mutation(
        *("family", "Granite's logits_scaling is forgotten", "ssmd/families/granitemoehybrid.py"),
        *("scale=1.0 / c.logits_scaling", "scale=1.0"),
        "authoring/test_authoring.py::test_logits_and_states_are_those_of_transformers[granite-uneven]",
    ),
    Mutation(
        *("family", "Mamba-2's A loses its sign", "ssmd/families/mixer.py"),
        *("-np.exp(", "np.exp("),
        "authoring/test_authoring.py::test_logits_and_states_are_those_of_transformers[mamba2-uneven]",
    ),
    Mutation(
        *("engine", "top_k takes one token more", "ssmd/engine/sampling/sampler.py"),
        *("_largest(rows, maxima, params.top_k)", "_largest(rows, maxima, params.top_k + 1)"),
        "engine/test_sampling.py",
    ),
    Mutation(
        *("text", "a stop string that begins anew within itself is missed", "ssmd/text/stops.py"),
        *("                    n = self._borders[i][n - 1]", "                    n = 0"),
        "text/test_stops.py",
    ),
    Mutation(
        *("runtime", "one token more than the context is taken", "ssmd/runtime/checked.py"),
        *("held.position + more > self.context:", "held.position + more > self.context + 1:"),
        "contract/test_refusals.py::test_more_than_the_context[litert-granite-f32]",
    ),
    Mutation(
        *("API", "any page on the web may ask", "ssmd/api/http/security.py"),
        *(
            "if not given or (len(given) == 1 and (readable or given[0].lower() == own)):",
            "if not given or len(given) == 1:",
        ),
        "api/test_security.py",
    ),
)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ssmd-mutations-") as folder:
        copy = Path(folder) / "ssmd"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, tracked.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        tests = dict.fromkeys(m.test for m in MUTATIONS)
        if failed := run(copy, *tests):
            sys.exit(f"before anything is broken:\n{failed}")
        print("| area | broken | test that fails | s |\n| --- | --- | --- | --- |")
        missed = 0
        for mutation in MUTATIONS:
            file = copy / mutation.file
            text = file.read_text("utf-8")
            assert text.count(mutation.old) == 1, (
                f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times"
            )
            file.write_text(text.replace(mutation.old, mutation.new), "utf-8")
            start = time.monotonic()
            failed = run(copy, mutation.test)
            file.write_text(text, "utf-8")
            missed += not failed
            print(
                f"| {mutation.area} | {mutation.what} | {failed or '**none**'} | {time.monotonic() - start:.0f} |",
                flush=True,
            )
    sys.exit(f"{missed} were not seen" if missed else 0)


def run(copy: Path, *tests: str) -> str:
    """Return the first test that failed, or ""."""
    around = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), str(copy / "runtimes")))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", *(f"tests/{t}" for t in tests)]
    done = subprocess.run(command, cwd=copy, env=around, capture_output=True, text=True, check=False)
    found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode and not found:
        return done.stdout[-2000:] + done.stderr[-2000:]
    return found[0].removeprefix("tests/") if found else ""


if __name__ == "__main__":
    main()
