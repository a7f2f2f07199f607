"""The files of a release: the same bytes from the same commit, all that is committed, its version."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from modules import ROOT
from programs import script

from ssmd import __version__

release = script("release")
CHANGELOG = """# Changelog

## 0.2.0 (unreleased)
What comes.

### More
- One thing.

## 0.1.0 (2026-11-30)
The first.

## 0.0.10
"""


@pytest.fixture(scope="module", autouse=True)
def _clone() -> None:
    pytest.importorskip("hatchling")
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("this is no clone")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    files: list[Path] = release.twice(Path(sys.executable), tmp_path_factory.mktemp("release"))
    return files


def test_a_wheel_and_an_sdist_of_this_version(built: list[Path]) -> None:
    names = [f"ssmd_daemon-{__version__}-py3-none-any.whl", f"ssmd_daemon-{__version__}.tar.gz"]
    assert [file.name for file in built] == names


def test_the_sdist_has_what_is_committed(built: list[Path]) -> None:
    """Within the folders and files that pyproject.toml names for it."""
    hatch = tomllib.loads(release.git("show", "HEAD:pyproject.toml"))["tool"]["hatch"]["build"]["targets"]
    named = tuple(one.lstrip("/") for one in hatch["sdist"]["include"])
    committed = release.git("ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0")
    expected = {name for name in committed if name in named or name.startswith(tuple(f"{one}/" for one in named))}
    with tarfile.open(built[1]) as opened:
        found = {name.partition("/")[2] for name in opened.getnames()}
    assert found - expected == {"PKG-INFO", "pyproject.toml", ".gitignore"}
    assert not expected - found
    assert {"docker/Dockerfile", "tests/data/sessions-0001.sqlite", "scripts/release"} < found


def test_how_git_is_set_here_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (name, value) in enumerate((("core.autocrlf", "true"), ("tar.umask", "0077"))):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", name)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    written = release.committed(tmp_path / "tree") / "scripts" / "release"
    assert written.read_bytes() == release.git("show", "HEAD:scripts/release").encode()
    assert written.stat().st_mode & 0o777 == 0o755


def test_other_bytes_are_noticed(built: list[Path], tmp_path: Path) -> None:
    for file in built:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    release.check_same(built, tmp_path)
    with (tmp_path / built[1].name).open("ab") as opened:
        opened.write(b"\0")
    with pytest.raises(release.ReleaseError, match=r"tar\.gz has other bytes when it is built again"):
        release.check_same(built, tmp_path)


def test_the_section_of_a_version() -> None:
    assert release.notes(CHANGELOG, "0.2.0") == (True, "What comes.\n\n### More\n- One thing.\n")
    assert release.notes(CHANGELOG, "0.1.0") == (False, "The first.\n")
    for missing in ("0.0.10", "0.2", "0.3.0"):
        with pytest.raises(release.ReleaseError, match="has no section"):
            release.notes(CHANGELOG, missing)


def test_this_version_has_its_section() -> None:
    assert release.version_of(ROOT) == __version__
    assert release.notes((ROOT / "CHANGELOG.md").read_text("utf-8"), __version__)[1]


def test_pages_name_the_wheel_of_this_version() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        named = re.findall(r"ssmd_daemon-([\d.]+)[-.]", page.read_text("utf-8"))
        assert set(named) <= {__version__}, page
