"""Settings as commands show them, the file that --config names, and exit codes of refused options."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import commands
import pytest
from test_server import environment

from ssmd import __version__


def ssmd(tmp_path: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return commands.ssmd(*arguments, env=environment(tmp_path, **extra))


def shown(tmp_path: Path, *arguments: str, **extra: str) -> dict[str, dict[str, Any]]:
    done = ssmd(tmp_path, *arguments, "--json", **extra)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text('max_queue = 7\napi_key = "a-very-secret-key"\n')
    path.chmod(0o600)
    return path


def test_where_each_setting_comes_from(tmp_path: Path, file: Path) -> None:
    rows = shown(tmp_path, "--config", str(file), "config", "show", "--threads", "3")
    assert rows["max_queue"] == {
        "name": "max_queue", "value": 7, "hidden": False, "from": "file", "where": str(file)
    }  # fmt: skip
    assert (rows["threads"]["value"], rows["threads"]["from"], rows["threads"]["where"]) == (3, "flag", "--threads")
    assert (rows["port"]["value"], rows["port"]["where"]) == (0, "SSMD_PORT")
    assert (rows["host"]["value"], rows["host"]["from"], rows["host"]["where"]) == ("127.0.0.1", "default", None)
    assert rows["models_dir"]["value"] == str(tmp_path / "data" / "models")
    assert [*shown(tmp_path, "config", "show", "port", "host")] == ["host", "port"]
    wrong = ssmd(tmp_path, "config", "show", "prot")
    assert (wrong.returncode, wrong.stderr) == (2, "error: there is no setting prot; did you mean port?\n")


@pytest.mark.parametrize(
    ("given", "value", "text"), [("-1", "-1", '"-1"'), ("90m", 5400.0, '"1h30m"'), ("0", 0.0, '"0s"')]
)
def test_a_time_is_shown_as_it_is_written(tmp_path: Path, given: str, value: Any, text: str) -> None:
    assert shown(tmp_path, "config", "show", SSMD_KEEP_ALIVE=given)["keep_alive"]["value"] == value
    said = ssmd(tmp_path, "config", "show", "keep_alive", SSMD_KEEP_ALIVE=given).stdout
    assert said.split()[:2] == ["keep_alive", text]


def test_a_key_is_not_shown(tmp_path: Path, file: Path) -> None:
    said = ssmd(tmp_path, "config", "show", "--config", str(file))
    [line] = [line for line in said.stdout.splitlines() if line.startswith("api_key ")]
    assert line.split() == ["api_key", "(set;", "not", "shown)", str(file)]
    assert shown(tmp_path, "config", "show", "api_key", SSMD_API_KEY="another-secret-key") == {
        "api_key": {"name": "api_key", "value": None, "hidden": True, "from": "environment", "where": "SSMD_API_KEY"}
    }
    assert "secret" not in said.stdout + said.stderr


def test_a_named_file_wins_over_the_variable(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("max_queue = 8\n")
    assert shown(tmp_path, "config", "show", SSMD_CONFIG=str(other))["max_queue"]["value"] == 8
    for arguments in (("--config", str(file), "config", "show"), ("config", "show", f"--config={file}")):
        assert shown(tmp_path, *arguments, SSMD_CONFIG=str(other))["max_queue"]["value"] == 7
    assert ssmd(tmp_path, "--config", str(file), "config", "path").stdout == f"{file}\n"
    path = ssmd(tmp_path, "config", "path")
    assert path.stdout == f"{tmp_path / 'config' / 'ssmd' / 'config.toml'}\n"
    assert "no such file yet" in path.stderr
    for command in ("serve", "run", "list"):
        file.write_text("prot = 1\n")
        done = ssmd(tmp_path, "--config", str(file), command)
        assert (done.returncode, done.stdout) == (1, "")
        assert "did you mean port?" in done.stderr
    for command in ("serve", "run"):
        assert "did you mean port?" in ssmd(tmp_path, command, "--config", str(file)).stderr


def test_version(tmp_path: Path) -> None:
    assert ssmd(tmp_path, "version").stdout == ssmd(tmp_path, "--version").stdout == f"ssmd {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve --port 99999", "--port = '99999'"),
        ("serve --port 80a", "--port"),
        ("serve --quota much", "--quota = 'much'"),
        ("serve --data-dir {}/file", "is a file, not a folder"),
        ("serve --config {}/none", "there is no file"),
        ("--config {} list", "there is no file"),
        ("run m x --runtime litrt", "did you mean litert?"),
        ("run m x --runtime ../x", "no runtime is named '../x'"),
        ("pull smollm2 --runtime bogus", "no runtime is named 'bogus'"),
        ("build smollm2 --runtime bogus", "no runtime is named 'bogus'"),
        ("build smollm2 --runtime wgpu --buckets x", "--buckets 'x'"),
        ("build smollm2 --runtime wgpu --xamba cumba", "xamba is not an option"),
        ("build smollm2 --runtime wgpu --name ../x", "cannot be a model's name"),
        ("bench m --threads 0", "--threads = '0'"),
        ("doctor bogus", "no runtime is named 'bogus'"),
        ("session gc --quota x", "--quota = 'x'"),
    ],
)
def test_a_refused_option_is_a_usage_error(arguments: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = ssmd(tmp_path, *arguments.format(tmp_path).split())
    assert (done.returncode, done.stdout) == (2, ""), done
    assert said in done.stderr


def test_a_refused_variable_is_not(tmp_path: Path) -> None:
    for extra in ({"SSMD_PORT": "99999"}, {"SSMD_PROT": "1"}, {"SSMD_RUNTIME": "bogus"}, {"SSMD_CONFIG": "/none"}):
        done = ssmd(tmp_path, "run", "m", "x", **extra)
        assert (done.returncode, done.stdout) == (1, ""), extra
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
