"""The wheel: what is in it, what it says of itself. That it can be installed and serves is shown by scripts/wheel."""

from __future__ import annotations

import email.message
import email.parser
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = {
    "ssmd/": "ssmd/",
    "runtimes/": "",
    "clients/ssmd_tray/": "ssmd_tray/",
    "migrations/": "ssmd/migrations/",
    "clients/web/": "ssmd/web/",
}  # folder of the checkout -> in the wheel
INFO = "ssmd_daemon-{}.dist-info/"
WRITTEN = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments, "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this is no clone: {done.stderr}")
    return [name for name in done.stdout.split("\0") if name]


def in_the_wheel(name: str) -> str:
    [(folder, place)] = [(f, p) for f, p in PLACES.items() if name.startswith(f)]
    return place + name.removeprefix(folder)


def test_the_files_are_those_of_the_checkout(wheel: Path) -> None:
    """All that git has there, and all that lies there and git ignores: a rule that hides a folder from git hides it
    from the wheel, too."""
    tracked = git("ls-files", *PLACES)
    others = git("ls-files", "--others", *PLACES)  # ignored ones among them
    kept = {n for n in (*tracked, *others) if "__pycache__" not in n and (ROOT / n).exists()}
    expected = {in_the_wheel(name) for name in kept}
    assert {"ssmd/py.typed", "ssmd/build/builder.py", "ssmd/migrations/script.py.mako"} < expected
    assert {"ssmd_wgpu/shaders/scan.wgsl", "ssmd/refit/graphs/smollm2@litert-cpu-int8.graph"} < expected
    assert {"ssmd/web/index.html", "ssmd/web/vendor/LICENSE-preact"} < expected
    with zipfile.ZipFile(wheel) as opened:
        found = set(opened.namelist())
        assert found - expected == {INFO.format(wheel.name.split("-")[1]) + name for name in WRITTEN}
        assert not expected - found
        for name in tracked:
            if (ROOT / name).exists():
                assert opened.read(in_the_wheel(name)) == (ROOT / name).read_bytes(), name


def test_no_rule_of_git_hides_what_is_tracked() -> None:
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_it_says_what_it_is(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = metadata(wheel)
    assert (said["Name"], said["License-Expression"]) == ("ssmd-daemon", "Apache-2.0")
    assert said["Summary"] == project["description"]
    assert said["Requires-Python"] == ">=3.11"
    assert said["Author"] == "The ssmd developers"
    assert str(said["Keywords"]).split(",") == sorted(project["keywords"])
    assert set(said.get_all("Classifier", [])) == set(project["classifiers"])
    assert set(said.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert said["Description-Content-Type"] == "text/markdown"
    assert str(said.get_payload()).strip() == (ROOT / "README.md").read_text().strip()


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as opened:
        [name] = [n for n in opened.namelist() if n.endswith("/METADATA")]
        return email.parser.Parser().parsestr(opened.read(name).decode())
