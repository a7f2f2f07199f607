"""A runtime from elsewhere: a distribution of its own (tests/data/foreign) with an entry point and a class, installed
by pip, on which the contract suite runs as its author would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ("padding", "splits", "parts", "moving")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, installed; the project's environment stays as it is."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("foreign") / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index")
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(folder), str(ROOT / "tests" / "data" / "foreign")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def suite(site: Path, *arguments: str, families: str = "llama,mamba") -> tuple[int, str]:
    """Exit code and output of the contract suite for the runtime `plain`."""
    asked = {"SSMD_CONTRACT_RUNTIMES": "plain", "SSMD_CONTRACT_FAMILIES": families, "PYTHONPATH": str(site)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=ROOT,
        env={**kept, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_it_keeps_the_contract(site: Path) -> None:
    """Rules 1, 2 and 4 and states in parts, of a model with KV rows and one without."""
    code, said = suite(site, *(f"tests/contract/test_{name}.py" for name in QUICK))
    assert code == 0, said
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 45, said


@pytest.mark.full
def test_it_keeps_the_whole_contract(site: Path) -> None:
    code, said = suite(site, "tests/contract")
    assert code == 0, said
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 140, said


def test_the_suite_sees_a_state_that_is_wrong(site: Path) -> None:
    """The convolution's past is one token old: text would hardly show it."""
    model = site / "plain_runtime" / "model.py"
    right = model.read_text()
    wrong = right.replace("past[len(x) :].T", "past[len(x) - 1 : -1].T")
    assert wrong != right
    model.write_text(wrong)
    try:
        code, said = suite(site, "tests/contract/test_splits.py", "-x", families="mamba")
    finally:
        model.write_text(right)
    assert (code, "test_splits_agree" in said) == (1, True), said
