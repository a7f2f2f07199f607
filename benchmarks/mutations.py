"""Ways of breaking the code, and the test of the default set that sees each.

python benchmarks/mutations.py                 ten that were written, each with the test that sees it; that must fail
python benchmarks/mutations.py --drawn 30      as many drawn by --seed from engine, sessions, runtime and text
    [--seed 39] [--files GLOB] [--tests FILE…] of other files; with these tests, not all that the file can break
    [--nearest N]                              with the N test files that are the fewest imports away from the file

Each is made in a copy of the checkout, whose tests must pass before. The same seed draws the same mutations from the
same code. So two sets of tests can be compared: run it in a checkout with each.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
AREAS = tuple(f"ssmd/{area}/**/*.py" for area in ("engine", "sessions", "runtime", "text"))
FIRST = 4  # test files that run before the others
# An operator and one that looks much like it: the faults that a reader overlooks.
OTHER = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.And: "or",
    ast.Or: "and",
    ast.Add: "-",
    ast.Sub: "+",
}


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
        *("store", "states are read without their checksums", "ssmd/sessions/rows/blobs.py"),
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


@dataclass(frozen=True)
class DrawnMutation:
    """An operator of a file from `start` to `end`, offsets in its text, becomes `new`. line: the first is 1."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def of(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


def candidates(file: str, text: str) -> Iterator[DrawnMutation]:
    """Yield each operator of a file's code that another one can stand in for."""
    lines = [0]
    for line in text.split("\n"):
        lines.append(lines[-1] + len(line) + 1)

    def place(line: int, column: int) -> int:
        start = lines[line - 1]
        return start + len(text[start : lines[line]].encode()[:column].decode())

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides: Sequence[ast.expr] = [node.left, *node.comparators]
            operators: Sequence[ast.AST] = node.ops
        elif isinstance(node, ast.BoolOp):
            sides, operators = node.values, [node.op] * (len(node.values) - 1)
        elif isinstance(node, ast.BinOp):
            sides, operators = [node.left, node.right], [node.op]
        else:
            continue
        for left, operator, right in zip(sides, operators, sides[1:], strict=False):
            if type(operator) not in OTHER:
                continue
            start, end = place(left.end_lineno or 0, left.end_col_offset or 0), place(right.lineno, right.col_offset)
            # Between the two sides stand the operator, brackets and breaks of lines.
            if found := re.fullmatch(r"([\s)]*)(not\s+in|is\s+not|[a-z]+|[<>=!+-]+)([\s(]*)", text[start:end]):
                at = start + len(found[1])
                yield DrawnMutation(file, text.count("\n", 0, at) + 1, at, at + len(found[2]), OTHER[type(operator)])


def drawn(count: int, seed: int, areas: Sequence[str] = AREAS) -> list[DrawnMutation]:
    """Draw mutations, the same for the same seed and the same code."""
    files = sorted({file for area in areas for file in ROOT.glob(area)})
    every = [c for f in files for c in candidates(f.relative_to(ROOT).as_posix(), f.read_text("utf-8"))]
    return random.Random(seed).sample(every, min(count, len(every)))


@contextmanager
def copied() -> Iterator[Path]:
    """Yield a copy of the checkout's tracked files, and of the tiny artifacts that its tests made already."""
    with tempfile.TemporaryDirectory(prefix="ssmd-mutations-") as folder:
        copy = Path(folder) / "ssmd"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, tracked.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        for made in ("sources", "artifacts"):
            if (ROOT / ".cache" / made).is_dir():
                shutil.copytree(ROOT / ".cache" / made, copy / ".cache" / made)
        yield copy


def broken_by(file: str) -> list[str]:
    """Return the test files that a change of a file can break, those that are the fewest imports away first."""
    command = [sys.executable, "-c", f"import changed; print(*changed.nearest({file!r}), sep='\\n')"]
    found = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=True).stdout.split()
    return [Path(name).relative_to(ROOT / "tests").as_posix() for name in found]


def draw(count: int, seed: int, areas: Sequence[str], tests: Sequence[str], nearest: int | None) -> None:
    """Print which test sees each of the mutations that `seed` draws. Exits with 1 if one is seen by none.

    The few files nearest to it run first: most mutations are seen there, in seconds.
    """
    with copied() as copy:
        print("| file | becomes | test that fails | s |\n| --- | --- | --- | --- |")
        survivors = 0
        for one in drawn(count, seed, areas):
            file, chosen = copy / one.file, tests or broken_by(one.file)[:nearest]
            text, start = file.read_text("utf-8"), time.monotonic()
            file.write_text(one.of(text), "utf-8")
            parts = (chosen[:FIRST], chosen[FIRST:])
            failed = next(filter(None, (run(copy, *part) for part in parts if part)), "")
            file.write_text(text, "utf-8")
            survivors += not failed
            line = one.of(text).split("\n")[one.line - 1].strip()
            place, seconds = f"{one.file}:{one.line}", time.monotonic() - start
            print(f"| {place} | `{line}` | {failed or '**none**'} | {seconds:.0f} |", flush=True)
    sys.exit(f"{survivors} were not seen" if survivors else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seed", type=int, default=39)
    parser.add_argument("--files", nargs="*", default=AREAS)
    parser.add_argument("--tests", nargs="*", default=())
    parser.add_argument("--nearest", type=int, help="how many of the test files that a file can break")
    asked = parser.parse_args()
    if asked.drawn:
        draw(asked.drawn, asked.seed, asked.files, asked.tests, asked.nearest)
    with copied() as copy:
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
