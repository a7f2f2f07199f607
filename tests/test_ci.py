"""CI runs all of it, and once more what failed; its end names that. Stand-ins take the place of what takes minutes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from modules import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the scripts are bash")

NOTE = 'echo "$(basename "$0")" "$@" >>calls'
TEST = f"""{NOTE}
cache=.pytest_cache
[[ "${{1:-}}" != --ui ]] || cache=.pytest_cache/ui
mkdir -p $cache/v/cache
[[ " $* " == *" --last-failed "* ]] && exit ${{SECOND:-0}}
echo "{{\\"tests/test_of${{1:-}}.py::test_a\\": true}}" >$cache/v/cache/lastfailed
exit ${{FIRST:-0}}"""
SCRIPTS = {"setup": NOTE, "check": f"{NOTE}; exit ${{CHECK:-0}}", "test": TEST}
ALL = ["check", "test", "test --ui", "wheel"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in (".ci", "scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name, lines in SCRIPTS.items():
        (tmp_path / "scripts" / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (tmp_path / "scripts" / name).chmod(0o755)
    (tmp_path / "scripts" / "wheel").write_text("open('calls', 'a').write('wheel\\n')")
    return tmp_path


def run(checkout: Path, **given: str) -> tuple[int, list[str], str]:
    """Return the exit code, the calls after the set-up, sorted, and the output."""
    done = subprocess.run(
        [checkout / ".ci" / "run"], env={**os.environ, **given}, capture_output=True, text=True, check=False
    )
    first, *calls = (checkout / "calls").read_text().splitlines()
    assert first.startswith("setup ")
    return done.returncode, sorted(calls), done.stdout


def test_ci_runs_all_of_it_once(checkout: Path) -> None:
    assert run(checkout) == (0, ALL, "")


@pytest.mark.parametrize("second", [0, 1])
def test_ci_names_what_it_ran_again(checkout: Path, second: int) -> None:
    code, calls, said = run(checkout, FIRST="1", SECOND=str(second))
    again = ["check", "test", "test --last-failed", "test --ui", "test --ui --last-failed"]
    assert (code, calls) == (second, again if second else [*again, "wheel"])
    assert said.startswith("==> failed at first, and run once more:\n")
    assert {"tests/test_of.py::test_a", "tests/test_of--ui.py::test_a"} <= set(said.splitlines())


def test_ci_fails_where_the_checks_do(checkout: Path) -> None:
    code, calls, _ = run(checkout, CHECK="3")
    assert code == 1
    assert "test" in calls


def test_tests_of_the_page_are_in_its_folder() -> None:
    """`scripts/test --ui` collects no other."""
    mark = re.compile(r"pytest\.mark\.ui\b")
    found = {f.relative_to(ROOT / "tests").parts[0] for f in ROOT.glob("tests/**/*.py") if mark.search(f.read_text())}
    assert found <= {"clients", Path(__file__).name}
    assert "clients" in found
