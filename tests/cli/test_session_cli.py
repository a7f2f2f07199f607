"""`ssmd session`, run as a user runs it: what it prints, what it refuses, its exit codes."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keeping import HYBRID, Chat, state_of, user

from ssmd.cli import main
from ssmd.cli import session as session_module
from ssmd.sessions.checkpoint import ON_DISK, NewCheckpoint
from ssmd.sessions.line import Line
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store


@dataclass(frozen=True)
class Ran:
    stdout: str
    stderr: str


class Ssmd:
    """A data directory, and `ssmd session` on it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.data = folder / "data"
        self.data.mkdir(mode=0o700, exist_ok=True)
        self._patch = patch
        patch.chdir(folder)
        for name in [n for n in os.environ if n.startswith("SSMD_")]:
            patch.delenv(name)
        for name, value in {"DATA_DIR": self.data, "MODELS_DIR": folder / "models", "CONFIG": folder / "none"}.items():
            patch.setenv(f"SSMD_{name}", str(value))
        (folder / "none").touch()
        (folder / "none").chmod(0o600)  # whatever the umask: one that others may write is refused
        patch.setenv("COLUMNS", "200")

    def __call__(self, *args: str, code: int = 0) -> Ran:
        """In this process, as it takes a second to start another; one test does."""
        self._patch.setattr(sys, "argv", ["ssmd", "session", *args])
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code, err.getvalue()
        return Ran(out.getvalue(), err.getvalue())

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json").stdout)


@pytest.fixture
def ssmd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssmd:
    return Ssmd(tmp_path, monkeypatch)


def test_a_long_list_is_cut(ssmd: Ssmd) -> None:
    store = Store.open(ssmd.data)
    for i in range(102):
        Chat(store, f"ses_{i}").say(f"t{i}", None, f"question {i}", "yes")
    store.close()
    whole = [s["id"] for s in ssmd.json("list")]
    assert len(whole) == 102
    ran = ssmd("list")
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:]] == whole[:100]
    assert ran.stderr == "these are the 100 used last; --all lists the others too\n"
    ran = ssmd("list", "--all")
    assert len(ran.stdout.splitlines()) == 103
    assert ran.stderr == ""
    ssmd("rm", "ses_101", "ses_0")
    assert ssmd("list").stderr == ""


@pytest.fixture
def chat(ssmd: Ssmd) -> Iterator[Chat]:
    store = Store.open(ssmd.data)
    chat = Chat(store, "ses_1")
    chat.say("t1", None, "What is [red]markup[/red]?", "hello\x1b[2J\x07 there", system="Be brief.")
    chat.say("t2", "t1", "more", "sure")
    chat.say("t2b", "t1", "less", "fine")
    yield chat
    store.close()


def test_list(ssmd: Ssmd, chat: Chat) -> None:
    Chat(chat.store, "ses_2").say("u1", None, "later", "yes")
    shown = ssmd("list").stdout
    assert shown.index("ses_2") < shown.index("ses_1"), "it was used last, though the fixture's clock ran further"
    assert "[red]markup[/red]" in shown
    assert "made-up" in shown
    second, first = ssmd.json("list")
    assert (first["id"], first["turns"], first["title"]) == ("ses_1", 3, "What is [red]markup[/red]?")
    assert second["id"] == "ses_2"
    assert first["bytes"] + second["bytes"] == chat.store.bytes_stored()


def test_as_a_process_of_its_own(ssmd: Ssmd, chat: Chat) -> None:
    command = [sys.executable, "-m", "ssmd", "session"]
    shown = subprocess.run([*command, "list"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == ssmd("list").stdout
    failed = subprocess.run([*command, "show", "nobody"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == "error: there is no session 'nobody'; `ssmd session list` shows those there are\n"


def test_list_of_nothing(ssmd: Ssmd) -> None:
    done = ssmd("list")
    assert done.stdout == ""
    assert "no session" in done.stderr
    assert ssmd.json("list") == []


def test_show(ssmd: Ssmd, chat: Chat) -> None:
    chat.store.commit([replace(chat.make("t3", "t2", [user("and?")], "cut o")[0], complete=False)], session=chat.info)
    shown = ssmd("show", "ses_1").stdout
    assert "system: Be brief." in shown
    assert "user: What is [red]markup[/red]?" in shown
    assert "assistant: cut o  [cut off]" in shown
    assert "1 on other branches" in shown
    assert "less" not in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
    told = ssmd.json("show", "ses_1")
    assert [(t["id"], t["parent"]) for t in told["tree"]] == [("t1", None), ("t2", "t1"), ("t2b", "t1"), ("t3", "t2")]
    assert told["tree"][0]["answer"]["content"] == "hello\x1b[2J\x07 there"
    assert told["head"] == "t3"


def test_the_owner_is_shown_where_there_is_one(ssmd: Ssmd, chat: Chat) -> None:
    assert "key" not in ssmd("list").stdout.splitlines()[0]
    assert ", of " not in ssmd("show", "ses_1").stdout
    Chat(chat.store, "ses_2", owner="alice").say("u1", None, "of alice", "yes")
    head, *rows = ssmd("list").stdout.splitlines()
    assert head.split()[-2:] == ["key", "title"]
    assert [row.split()[0] for row in rows if " alice " in row] == ["ses_2"]
    assert ", of alice, " in ssmd("show", "ses_2").stdout.splitlines()[0]
    assert {s["id"]: s["owner"] for s in ssmd.json("list")} == {"ses_1": None, "ses_2": "alice"}


def test_away_and_back(ssmd: Ssmd, chat: Chat, tmp_path: Path) -> None:
    assert "3 turns, 2 states" in ssmd("export", "ses_1", "chat.ssmd").stdout
    assert "exists already" in ssmd("export", "ses_1", "chat.ssmd", code=1).stderr
    told = ssmd.json("export", "ses_1", "chat.ssmd", "--force")
    size = (tmp_path / "chat.ssmd").stat().st_size
    assert told == {"file": "chat.ssmd", "bytes": size, "turns": 3, "states": 2, "left_out": 0}
    done = ssmd("import", "chat.ssmd")
    assert "no model is installed here" in done.stderr
    assert "a new id" in done.stdout
    ssmd("rm", "ses_1")
    told = ssmd.json("import", "chat.ssmd")
    assert (told["id"], told["renamed"], told["turns"], told["states"]) == ("ses_1", False, 3, 2)
    assert len(ssmd.json("list")) == 2
    assert ssmd.json("show", "ses_1")["imported"] is True


def test_remove(ssmd: Ssmd, chat: Chat) -> None:
    Chat(chat.store, "ses_2").say("u1", None, "later", "yes")
    assert "no session 'nobody'" in ssmd("rm", "ses_1", "nobody", code=1).stderr
    assert len(ssmd.json("list")) == 2, "a wrong id among them: nothing is removed"
    assert ssmd("rm", "ses_1").stdout == "removed ses_1\n"
    assert ssmd.json("rm", "ses_2", "ses_2") == {"removed": ["ses_2"]}
    assert ssmd.json("list") == []
    assert chat.store.bytes_stored() == 0


def test_json_holds_nothing_that_steers_a_terminal(ssmd: Ssmd, chat: Chat) -> None:
    said = "\x9b31m \x7f \u202e \u2066 \x1b]0; \U000e0041 ä 例 😀"
    chat.say("t3", "t2", said, said)
    Chat(chat.store, "ses_2").say("u1", None, said, "yes")
    for command in (["list"], ["show", "ses_1"], ["tree", "ses_1"]):
        shown = ssmd(*command, "--json").stdout
        assert all(c.isprintable() or c == "\n" for c in shown)
    assert ssmd.json("show", "ses_1")["tree"][-1]["answer"]["content"] == said
    assert "ä 例 😀" in ssmd("show", "ses_1", "--json").stdout


def test_rename(ssmd: Ssmd, chat: Chat) -> None:
    assert ssmd("rename", "ses_1", "About markup").stdout == "About markup\n"
    assert ssmd.json("list")[0]["title"] == "About markup"
    assert ssmd.json("rename", "ses_1")["title"] == "What is [red]markup[/red]?"
    assert "a title must have 1 to 200 characters" in ssmd("rename", "ses_1", "", code=1).stderr
    assert "must not have control characters" in ssmd("rename", "ses_1", "\x1b[31m", code=1).stderr
    assert "no session 'nobody'" in ssmd("rename", "nobody", "x", code=1).stderr


def test_search(ssmd: Ssmd, chat: Chat) -> None:
    Chat(chat.store, "ses_2").say("u1", None, "later", "yes, sure")
    assert [one["id"] for one in ssmd.json("list", "--search", "SURE")] == ["ses_2", "ses_1"]
    assert [one["id"] for one in ssmd.json("list", "--search", "markup less")] == ["ses_1"]
    shown = ssmd("list", "--search", "later")
    assert "ses_2" in shown.stdout
    assert "ses_1" not in shown.stdout
    nothing = ssmd("list", "--search", "nowhere")
    assert (nothing.stdout, nothing.stderr) == ("", "no session has all these words\n")


def test_pin(ssmd: Ssmd, chat: Chat) -> None:
    assert ssmd("pin", "ses_1").stdout == "pinned ses_1\n"
    assert ssmd.json("list")[0]["pinned"] is True
    assert "pinned" in ssmd("list").stdout
    assert "no session 'nobody'" in ssmd("unpin", "ses_1", "nobody", code=1).stderr
    assert ssmd.json("list")[0]["pinned"] is True, "a wrong id among them: nothing is changed"
    assert ssmd.json("unpin", "ses_1") == {"unpinned": ["ses_1"]}
    assert ssmd.json("list")[0]["pinned"] is False


def test_collect_what_no_list_shows(ssmd: Ssmd, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that may get its turn yet stays, and so do all sessions."""
    kept, ids = chat.store.bytes_stored(), tuple(range(90, 140))
    for seal in (None, ON_DISK):
        state = NewCheckpoint("user", Line.of(ids), state_of(HYBRID, np.asarray(ids)), seal=seal)
        assert chat.store.keep(chat.encode(state)).nbytes > 0
    assert "goes with neither" in ssmd("gc", "--unlisted", "--dry-run", code=2).stderr
    assert "1 state of requests that are not stored was removed" in ssmd("gc", "--unlisted").stdout
    assert chat.store.bytes_stored() > kept, "the other one was written just now"
    monkeypatch.setattr(session_module, "_UNDER_WAY_S", 0.0)
    assert ssmd.json("gc", "--unlisted")["checkpoints"] == 1
    assert chat.store.bytes_stored() == kept


def test_collect(ssmd: Ssmd, chat: Chat) -> None:
    Chat(chat.store, "ses_2").say("u1", None, "later", "yes")
    before = chat.store.bytes_stored()
    told = ssmd.json("gc", "--quota", "2kB", "--dry-run")
    assert (told["dry_run"], told["over"], told["quota"]) == (True, 0, 2000)
    assert told["bytes"] == sum(s["bytes"] for s in told["sessions"]) == before - told["left"] > 0
    assert chat.store.bytes_stored() == before
    assert "would be removed" in ssmd("gc", "--quota", "2kB", "--dry-run").stdout
    done = ssmd.json("gc", "--quota", "2kB")
    assert done == told | {"dry_run": False}
    assert chat.store.bytes_stored() == done["left"] <= 2000
    assert "0 states of 0 sessions were removed" in ssmd("gc").stdout
    Chat(chat.store, "ses_3").say("x1", None, "again", "yes")
    ssmd("pin", "ses_3")
    assert "pinned sessions alone exceed" in ssmd("gc", "--quota", "0", code=1).stderr
    ssmd("unpin", "ses_3")
    assert ssmd.json("gc", "--quota", "0")["left"] == 0
    assert "expected bytes" in ssmd("gc", "--quota", "much", code=2).stderr
    assert [t["id"] for t in ssmd.json("show", "ses_1")["tree"]] == ["t1", "t2", "t2b"]


def test_check(ssmd: Ssmd, chat: Chat) -> None:
    assert ssmd("check").stdout == "1 session, 3 turns, 6 checkpoints: all sound\n"
    raw = sqlite3.connect(ssmd.data / FILE)
    raw.execute("UPDATE piece SET data = x'00' WHERE checkpoint = 4")
    raw.execute("UPDATE turn SET items = CAST('\x1b[2J' AS BLOB) WHERE id = 't2b'")
    raw.commit()
    raw.close()
    found = ssmd("check", code=1).stdout
    assert "checkpoint 4: its recurrent values were altered" in found
    assert "turn 't2b' of session 'ses_1'" in found
    assert "--repair" in found
    assert "\x1b" not in found
    done = ssmd.json("check", "--repair")
    assert (done["repaired"], done["sound"], done["turns"], done["checkpoints"]) == (True, False, 2, 3)
    assert ssmd.json("check") == done | {"repaired": False, "sound": True, "damages": []}


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (("show", "nobody"), 1, "no session 'nobody'"),
        (("show", "../../etc/passwd"), 1, "no session"),
        (("export", "nobody", "x.ssmd"), 1, "no session 'nobody'"),
        (("import", "nothing.ssmd"), 1, "there is no file"),
        (("import", "data"), 1, "is not a file"),
        (("rm",), 2, "Missing argument"),
        (("show",), 2, "Missing argument"),
        (("fly",), 2, "No such command"),
    ],
)
def test_bad_input(ssmd: Ssmd, args: tuple[str, ...], code: int, reason: str) -> None:
    done = ssmd(*args, code=code)
    assert reason in done.stderr
    assert done.stdout == ""


def test_a_data_directory_of_a_newer_version(ssmd: Ssmd, chat: Chat) -> None:
    chat.store.close()
    raw = sqlite3.connect(ssmd.data / FILE)
    raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.commit()
    raw.close()
    assert "written by another version of ssmd (revision '9999'" in ssmd("list", code=1).stderr
