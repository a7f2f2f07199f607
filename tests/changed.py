"""The tests that a change can break: python changed.py [REV] prints pytest's arguments, one a line.

A test file runs its own code, what that imports wherever it does, and what it starts: `ssmd` as a process is all of
ssmd; a program or a folder of tests' is what that runs; tiny artifacts are what builds them, and the runtimes that the
file names. What is no module counts for the test
files that name it, or the folder that it lies in. Those that read every page or every module's text always run. Without
REV: what is not committed, and what the branch has that its upstream, else main, has not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from modules import ALL, MODULES, ROOT, distances, module_of, reached_from

ALWAYS = {ROOT / "tests" / name for name in ("test_house.py", "test_words.py", "machine/test_installation.py")}
ALL_TESTS = ("pyproject.toml", "tests/conftest.py", "tests/modules.py", "scripts/test", "scripts/setup")
EVALUATOR = ("tests/mil/", "pyproject.toml")  # which says what coremltools is
PROCESS = re.compile(r'"-m", "ssmd"|import commands|daemon_process|evaluated\.SSMD|import SSMD')
STARTED = re.compile(r'"(\w+)\.py"|"tests/(\w+)["/]|"tests" / "data" / "(\w+)"')  # a program, a folder of tests, code
ARTIFACTS = re.compile(r"\bartifacts\b|\bget_runtime\b")
NAMED = {r"openvino|npu": "ssmd_openvino", "wgpu": "ssmd_wgpu", "coreml|evaluated": "ssmd_coreml", "": "ssmd_litert"}
BUILDERS = ("ssmd.build.", "ssmd.authoring.", "ssmd.families.")
READ_BY = {  # files that a module reads; of several places the first counts
    "ssmd/refit/graphs/": "ssmd.refit.catalog",
    "migrations/": "ssmd.sessions.rows.opening",  # modules of its own among them, which Alembic finds by their place
    "runtimes/ssmd_wgpu/": "ssmd_wgpu.device",
    "tests/data/artifacts/": "kept",
    "tests/client/": "openai_client",
    **dict.fromkeys(("ssmd/", "runtimes/", "clients/", ".gitignore"), "test_wheel"),  # whether it is in the wheel
}


def main(revision: str | None = None) -> None:
    files = changed(revision)
    if any(f.startswith(EVALUATOR) for f in files):
        print("-m", "(not full or evaluator) and not ui", sep="\n")
    print(*(f.relative_to(ROOT) for f in broken_by(files)), sep="\n")


def changed(revision: str | None) -> list[str]:
    """Paths that differ from where the branch left `revision`, in commits, in the index or beside it."""
    base = git("merge-base", "HEAD", revision or upstream()).strip()
    committed = git("diff", "--name-only", "--no-renames", base)
    return [*committed.splitlines(), *git("ls-files", "--others", "--exclude-standard").splitlines()]


def upstream() -> str:
    for name in ("@{upstream}", "origin/main", "main"):
        if git("rev-parse", "--verify", "--quiet", name, check=False):
            return name
    return "HEAD"


def git(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=check).stdout


def broken_by(paths: Iterable[str]) -> list[Path]:
    """Test files that what stands at `paths` can break, by name."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    if any(p in ALL_TESTS for p in paths):
        return tests
    modules, others = set[str](), list[Path]()
    for path in paths:
        file = ROOT / path
        reader = next((m for place, m in READ_BY.items() if path.startswith(place)), None)
        if file.suffix == ".py":
            modules.add(module_of(file))
        if reader is not None:
            modules.add(reader)
        if path.startswith("tests/") or (file.suffix != ".py" and reader is None):  # helpers run as programs, too
            others.append(file)
    return [t for t in tests if t in ALWAYS or not modules.isdisjoint(ran_by(t)) or any(named(o, t) for o in others)]


def nearest(path: str) -> list[Path]:
    """Return the test files that a change of `path` can break: the fewest imports away first, of its folder first."""
    module = module_of(ROOT / path)
    far = len(ALL)  # of a test that starts the module in another process
    away = {test: distances(module_of(test)).get(module, far) for test in broken_by([path])}
    folder = path.split("/")[1]
    return sorted(away, key=lambda test: (away[test], test.relative_to(ROOT / "tests").parts[0] != folder))


@cache
def ran_by(test: Path) -> set[str]:
    """Modules that run, or have run, when a test file does."""
    ran = reached_from([module_of(test), *_conftests(test)], but=["conftest", "kept"])
    for program, folder, data in STARTED.findall(test.read_text("utf-8")):
        place = f"{folder}." if folder else f"data.{data}."
        started = [m for m in ALL if m not in MODULES and (m == program or m.startswith(place))]
        ran |= reached_from(started, but=["conftest", "kept"])
    text = "\n".join(_text(m) for m in ran if m not in MODULES)
    if PROCESS.search(text):
        ran |= reached_from(["ssmd.__main__"])
    if ARTIFACTS.search(text):
        packages = [package for name, package in NAMED.items() if re.search(name, text)]
        ran |= reached_from(m for m in MODULES if m.startswith((*BUILDERS, *packages))) | {"kept", "tiny"}
    return ran


def _conftests(test: Path) -> Iterator[str]:
    """Yield the conftest of each of the test's folders except tests/ itself, which applies to all tests."""
    for folder in test.parents[: len(test.relative_to(ROOT / "tests").parts) - 1]:
        if (folder / "conftest.py").exists():
            yield module_of(folder / "conftest.py")


def named(file: Path, test: Path) -> bool:
    """Report if a test file, or one that it runs, names a file or the folder that holds it."""
    words = frozenset({file.name, *file.relative_to(ROOT).parts[2:-1]})
    return any(_names(m, words) for m in ran_by(test) if m not in MODULES)


@cache  # most test files run the same helpers
def _names(module: str, words: frozenset[str]) -> bool:
    return bool(re.search(rf"[\"/]({'|'.join(map(re.escape, sorted(words)))})[\"/]", _text(module)))


@cache
def _text(module: str) -> str:
    return ALL[module].read_text("utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
