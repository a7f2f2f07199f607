"""`ssmd rm`: that it removes what was named and nothing else."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
from conftest import TinyArtifacts
from test_installed import put
from test_server import environment, running

from ssmd.installed import resolve
from ssmd.model.artifact import read_manifest


def ssmd(tmp_path: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return commands.ssmd(*arguments, env=environment(tmp_path), given=given, foreign=True)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models directory with two models; one has two artifacts."""
    (tmp_path / "data").mkdir(mode=0o700)
    folder = tmp_path / "data" / "models"
    put(folder, "one", "litert-cpu-int8", 5000)
    put(folder, "one", "openvino-cpu-int8", 7000)
    put(folder, "two", "litert-cpu-int8", 3000)
    return folder


def everything(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_model_goes_and_nothing_else(models: Path, tmp_path: Path) -> None:
    two = everything(models / "two")
    done = ssmd(tmp_path, "rm", "one", "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("removed one, 1")
    assert "its conversations stay" in done.stdout
    assert all(f"{models / 'one' / folder}: " in done.stderr for folder in ("litert-cpu-int8", "openvino-cpu-int8"))
    assert os.listdir(models) == ["two"]
    assert everything(models / "two") == two
    again = ssmd(tmp_path, "rm", "one", "--yes")
    assert again.returncode == 1
    assert "there is no model 'one' here" in again.stderr


def test_what_is_cached_of_it_goes_too(models: Path, tmp_path: Path) -> None:
    one, two = (resolve(name, models) for name in ("one", "two"))
    cache = tmp_path / "cache" / "litert"
    cache.mkdir(parents=True)
    files = {path: cache / f"{read_manifest(path).build[:24]}-2.3.0-0-2.lanes.json" for path in (one, two)}
    for file in files.values():
        file.touch()
    env = environment(tmp_path, SSMD_CACHE_DIR=str(cache.parent))
    assert commands.ssmd("rm", "one", "--yes", env=env, foreign=True).returncode == 0
    assert list(cache.iterdir()) == [files[two]]


def test_of_one_runtime(models: Path, tmp_path: Path) -> None:
    size = sum(p.stat().st_size for p in (models / "one" / "litert-cpu-int8").iterdir())
    done = ssmd(tmp_path, "rm", "one", "--runtime", "litert", "-y", "--json")
    assert json.loads(done.stdout) == {"removed": [str(models / "one" / "litert-cpu-int8")], "bytes": size}
    assert os.listdir(models / "one") == ["openvino-cpu-int8"]
    none = ssmd(tmp_path, "rm", "one", "--runtime", "litert", "-y")
    assert (none.returncode, none.stderr.count("\n")) == (1, 1)
    assert "has no artifact for runtime 'litert'; it has: openvino" in none.stderr


def test_of_one_quantization(models: Path, tmp_path: Path) -> None:
    put(models, "one", "openvino-cpu-int4", 4000)
    done = ssmd(tmp_path, "rm", "one", "--runtime", "openvino", "--quant", "int4", "-y")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(models / "one")) == ["litert-cpu-int8", "openvino-cpu-int8"]
    none = ssmd(tmp_path, "rm", "one", "--quant", "int4", "-y")
    assert (none.returncode, none.stderr.count("\n")) == (1, 1)
    assert "has no artifact in 'int4'; it has: int8" in none.stderr


def test_it_asks(models: Path, tmp_path: Path) -> None:
    unasked = ssmd(tmp_path, "rm", "two")
    assert unasked.returncode == 2
    assert "--yes" in unasked.stderr
    assert ssmd(tmp_path, "rm", "two", given="y\n").returncode == 2, "who is no terminal is not asked"
    for answer, left in ((b"n\n", ["one", "two"]), (b"y\n", ["one"])):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-m", "ssmd", "rm", "two"],
            env=environment(tmp_path),
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as asks:
            os.write(ours, answer)
            _, said = asks.communicate(timeout=60)
        os.close(ours)
        os.close(theirs)
        assert "Remove this? [y/N]" in said
        assert asks.returncode == (0 if left == ["one"] else 1)
        assert sorted(os.listdir(models)) == left


@pytest.mark.parametrize(
    "name",
    ["..", "/", "../models/one", "one/litert-cpu-int8", ".hidden", "", "on*", "one\n"],
)
def test_a_name_that_is_none(models: Path, tmp_path: Path, name: str) -> None:
    before = everything(tmp_path / "data")
    assert ssmd(tmp_path, "rm", "-y", "--", name).returncode == 2
    assert everything(tmp_path / "data") == before


def test_links_are_left_alone(models: Path, tmp_path: Path) -> None:
    elsewhere = put(tmp_path / "elsewhere", "m", "litert-cpu-int8")
    (models / "linked").symlink_to(elsewhere.parent)
    (models / "inner").mkdir()
    (models / "inner" / "litert-cpu-int8").symlink_to(elsewhere)
    (models / "one" / "litert-cpu-f32").symlink_to(elsewhere)
    for name in ("linked", "inner", "one"):
        done = ssmd(tmp_path, "rm", "-y", name)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "is a link to" in done.stderr
    assert len(list(elsewhere.iterdir())) == 4
    assert (models / "one" / "openvino-cpu-int8").is_dir()
    (models / "two" / "litert-cpu-int8" / "link").symlink_to(elsewhere)
    assert ssmd(tmp_path, "rm", "-y", "two").returncode == 0
    assert len(list(elsewhere.iterdir())) == 4, "no link inside is followed"


def test_what_is_no_artifact_stays(models: Path, tmp_path: Path) -> None:
    (models / "two" / "notes").mkdir()
    (models / "two" / "notes" / "mine.txt").write_text("mine")
    (models / "two" / "readme").write_text("mine")
    (models / "photos" / "2026").mkdir(parents=True)
    assert "is not an artifact, and is not removed" in ssmd(tmp_path, "rm", "-y", "photos").stderr
    assert ssmd(tmp_path, "rm", "-y", "two").returncode == 0
    assert everything(models / "two") == ["notes", "notes/mine.txt", "readme"]
    assert (models / "photos" / "2026").is_dir()


def test_a_broken_one_can_go(models: Path, tmp_path: Path) -> None:
    (models / "two" / "litert-cpu-int8" / "artifact.json").write_text("{")
    (models / "one" / "litert-cpu-int8" / "model.bin").unlink()
    assert ssmd(tmp_path, "rm", "-y", "two", "--runtime", "litert").returncode == 0
    assert ssmd(tmp_path, "rm", "-y", "one").returncode == 0
    assert os.listdir(models) == []


def test_one_that_the_daemon_serves(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """It goes on with it; its conversations go on when the model is back."""
    folder = tmp_path / "data" / "models" / "tiny" / "litert-cpu-f32"
    folder.parent.mkdir(parents=True)
    (tmp_path / "data").chmod(0o700)
    shutil.copytree(artifacts["llama-f32"], folder)
    with running(tmp_path, "tiny") as (_, served):
        body: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        first = served.ask("POST", "/v1/chat/completions", body)
        assert first.status == 200, first.body
        done = ssmd(tmp_path, "rm", "tiny", "-y")
        assert done.returncode == 0, done.stderr
        assert "the running daemon has it loaded" in done.stderr
        assert not folder.parent.exists()
        assert served.ask("GET", "/health").status == 200
    session = first.json["usage"]["ssmd"]["session"]
    shutil.copytree(artifacts["llama-f32"], folder)
    assert resolve("tiny", tmp_path / "data" / "models") == folder
    with running(tmp_path, "tiny") as (_, served):
        body["messages"] += [first.json["choices"][0]["message"], {"role": "user", "content": "And?"}]
        again = served.ask("POST", "/v1/chat/completions", {**body, "session": session})
        assert again.status == 200, again.body
        assert again.json["usage"]["ssmd"]["resume"] == "exact"
