"""The completions offered to a shell: by the protocol of its script, and in a real bash."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from keeping import Chat
from test_installed import put
from test_server import environment

from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store


@pytest.fixture
def home(tmp_path: Path) -> Path:
    models = tmp_path / "data" / "models"
    for name in ("smollm2", "smaller", "granite-4.0-h-350m"):
        put(models, name, "litert-cpu-int8")
    (models / "empty").mkdir()
    (models / "evil $(touch x) `touch y`").mkdir()
    (models / "evil $(touch x) `touch y`" / "a").mkdir()
    (models / "evil $(touch x) `touch y`" / "a" / "artifact.json").touch()
    (tmp_path / "data").chmod(0o700)
    return tmp_path


def offered(home: Path, line: str, **extra: str) -> list[str]:
    """By the end of a line, as bash asks."""
    words = line.split(" ")
    asked = {"_SSMD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = commands.ssmd(env={**environment(home), **asked, **extra}, foreign=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.split()


def sessions_in(home: Path, count: int = 3) -> list[str]:
    store = Store.open(home / "data")
    try:
        for i in range(count):
            Chat(store, f"chat{i}").say(f"turn{i}", None, f"Hi {i}", "Hello")
        return [one.id for one in store.sessions()]
    finally:
        store.close()


@pytest.mark.parametrize("command", ["run", "serve", "show", "rm", "bench", "verify", "stop"])
def test_models(home: Path, command: str) -> None:
    assert offered(home, f"ssmd {command} sm") == ["smaller", "smollm2"]


def test_all_models_or_none(home: Path) -> None:
    assert offered(home, "ssmd run ") == ["granite-4.0-h-350m", "smaller", "smollm2"]
    assert offered(home, "ssmd run x") == []


def test_where_the_line_says(home: Path, tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", "other", "litert-cpu-int8")
    assert offered(home, f"ssmd run --models-dir {tmp_path / 'elsewhere'} ") == ["other"]
    assert offered(home, f"ssmd rm --data-dir {tmp_path / 'none'} ") == []
    assert offered(home, "ssmd run ", SSMD_MODELS_DIR=str(tmp_path / "elsewhere")) == ["other"]


@pytest.mark.parametrize(
    "line", ["show", "rm", "tree", "fork", "export", "pin", "unpin", "rename", "rm SOME", "../run tiny --session"]
)
def test_sessions(home: Path, line: str) -> None:
    ids = sessions_in(home)
    words = f"ssmd session {line.replace('SOME', ids[0])} " if "run" not in line else "ssmd run tiny --session "
    assert offered(home, words + ids[1]) == [ids[1]]


def test_the_one_used_last_is_first_also_while_a_daemon_writes(home: Path) -> None:
    ids = sessions_in(home)
    store = Store.open(home / "data")  # which has the database open, and its log beside it
    try:
        Chat(store, "late").say("turn", None, "Hi", "Hello")
        newest = [one.id for one in store.sessions()]
        assert len(newest) == len(ids) + 1
        assert offered(home, "ssmd session show ") == newest
    finally:
        store.close()


@pytest.mark.parametrize(
    "what", ["none", "no database", "a folder", "another table", "hostile ids", "no data directory"]
)
def test_nothing_fails_loudly(home: Path, what: str) -> None:
    file = home / "data" / FILE
    extra = {}
    if what == "no database":
        file.write_bytes(b"no database" * 1000)
    elif what == "a folder":
        file.mkdir()
    elif what in ("another table", "hostile ids"):
        with sqlite3.connect(file) as database:
            database.execute("CREATE TABLE session (id, last_used_at)" if "ids" in what else "CREATE TABLE x (y)")
            if "ids" in what:
                rows = [("$(touch z)",), ("a b",), ("x" * 65,), (b"bytes",), (None,), ("a\nb",), (7,)]
                database.executemany("INSERT INTO session VALUES (?, 0)", rows)
        database.close()
    elif what == "no settings":
        extra = {"SSMD_DATA_DIR": "", "SSMD_CONFIG": "/nowhere/config.toml"}
    before = sorted(os.listdir(home / "data"))
    assert offered(home, "ssmd session show ", **extra) == []
    offered(home, "ssmd run ", **extra)
    assert sorted(os.listdir(home / "data")) == before, "nothing is written"


def test_commands_and_options(home: Path) -> None:
    assert {"serve", "run", "ps", "stop", "rm", "logs", "completion"} <= set(offered(home, "ssmd "))
    assert offered(home, "ssmd ps --j") == ["--json"]


def test_scripts(home: Path) -> None:
    for shell in ("bash", "zsh", "fish", "powershell"):
        done = commands.ssmd("completion", shell, env=environment(home))
        assert done.returncode == 0
        assert f"complete_{shell}" in done.stdout
    unknown = commands.ssmd("completion", "tcsh", env=environment(home))
    assert unknown.returncode == 2
    assert "bash, zsh, fish" in unknown.stderr


def test_in_bash(home: Path) -> None:
    folder = Path(sys.executable).parent
    asked = (
        'eval "$(ssmd completion bash)"; complete -p ssmd; '
        'COMP_WORDS=(ssmd run sm); COMP_CWORD=2; _ssmd_completion ssmd; printf "%s\\n" "${COMPREPLY[@]}"; ls'
    )
    env = {**environment(home), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    (home / "here").mkdir()
    done = subprocess.run(
        ["bash", "--norc", "-c", asked], env=env, cwd=home / "here", capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["complete -o default -F _ssmd_completion ssmd", "smaller", "smollm2"], (
        done.stderr
    )


def test_what_it_imports(home: Path) -> None:
    """Each key press waits for it."""
    loaded = (
        "import sys, ssmd.cli; sys.argv = ['ssmd']\n"
        "try: ssmd.cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'pydantic_settings', 'sqlalchemy', 'rich.console') if m in sys.modules])"
    )
    for line in ("ssmd run ", "ssmd session show "):
        asked = {"_SSMD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        said = subprocess.check_output([sys.executable, "-c", loaded], text=True, env={**environment(home), **asked})
        assert said.splitlines()[-1] == "[]"
