"""A data directory that cannot be used: one clear error and exit code 1 from every command that uses it."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from conftest import TinyArtifacts
from test_server import environment

COMMANDS = (
    "session list",
    "session show x",
    "session tree x",
    "session fork x",
    "session export x {}/x.ssmd",
    "session export --all --into {}/out",
    "session import {}/file",
    "session rename x y",
    "session pin x",
    "session unpin x",
    "session rm x",
    "session gc",
    "session check",
    "session check --repair",
    "serve",
    "serve --no-store",
    "run smollm2 hello",
    "list",
    "show m",
    "verify m",
    "bench m",
    "pull nobody/nothing",
    "pull smollm2",
    "build smollm2 --runtime wgpu",
)
MAKING = ("session list", "session check --repair", "serve", "run smollm2 hello", "pull smollm2", "pull nobody/nothing")


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing can be made."""
    folder = tmp_path / "sealed"
    folder.mkdir(mode=0o500)
    if os.geteuid() != 0:
        yield folder
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here, and root may write everywhere else")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def refused(folder: Path, command: str, data_dir: Path) -> str:
    env = {**environment(folder), "SSMD_DATA_DIR": str(data_dir), "SSMD_PORT": "0", "HF_HUB_OFFLINE": "1"}
    env.pop("SSMD_MODELS_DIR", None)
    done = commands.ssmd(*command.format(folder).split(), env=env)
    said = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(said)) == (1, "", 1), (done.stdout, done.stderr)
    assert said[0].startswith("error: "), said
    return said[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_in_its_place(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.touch()
    assert f"{file} is a file, not a folder" in refused(tmp_path, command, file)


@pytest.mark.parametrize("command", [*MAKING, "build smollm2 --runtime wgpu"])
def test_it_cannot_be_made(sealed: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    said = refused(tmp_path, command, sealed / "data")
    assert str(sealed / "data") in said
    assert "ermission denied" in said or "Read-only file system" in said
    assert "choose another with SSMD_" in said


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("granite-4.0-h-350m", "ssmd pull granite-4.0-h-350m --from FOLDER"),
        ("ibm-granite/granite-4.0-h-350m", "ssmd pull granite-4.0-h-350m --from FOLDER"),
        ("nobody/nothing", "ssmd build FOLDER"),
    ],
)
def test_a_model_that_cannot_be_fetched(tmp_path: Path, name: str, advice: str) -> None:
    """A model that needs no PyTorch is not advised to be built."""
    assert refused(tmp_path, f"pull {name}", tmp_path / "data").endswith(advice)


def test_what_is_made_with_a_umask_of_0_is_not_refused(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """By the next command, as a folder that every user may write."""
    env = environment(tmp_path)
    for command in (f"pull m --from {artifacts.source('llama-f32')} --runtime wgpu", "show m", "session gc"):
        done = commands.ssmd(*command.split(), env=env, before="import os; os.umask(0)")
        assert done.returncode == 0, done.stderr
    assert not [path for path in (tmp_path / "data").rglob("*") if path.stat().st_mode & stat.S_IWOTH]
