"""Data not to be kept is in no file, removed data is gone from all files, and no other user may read the rest."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from cli.test_session_cli import Ssmd
from conftest import TinyArtifacts
from daemon import CHAT, daemon, quiet, soon
from keeping import Chat, new_store, user
from serving import Served
from test_server import environment, running

from ssmd.engine.persist.persistence import Persistence
from ssmd.sessions.files import transfer
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store
from ssmd.text.tokenizer import Tokenizer

SECRET = "the keeper hides the key under the third stair"


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["granite-int8"]


def traces(folder: Path, *secrets: str, tokenizer: Tokenizer | None = None) -> list[tuple[str, str]]:
    """(file, secret) for each file below `folder` that holds a secret, as text, as JSON or as token ids."""
    found = []
    for file in (f for f in folder.rglob("*") if f.is_file()):
        raw = file.read_bytes()
        for secret in secrets:
            forms = [secret.encode(), json.dumps(secret)[1:-1].encode()]
            if tokenizer is not None:
                forms.append(np.array(tokenizer.encode(secret)[1:-1], "<i4").tobytes())
            found += [(str(file.relative_to(folder)), secret) for form in forms if form in raw]
    return found


@pytest.fixture
def tokenizer(artifact: Path) -> Tokenizer:
    return Tokenizer.open(artifact / "tokenizer.json")


def chat(served: Served, model: str, *messages: tuple[str, str], **fields: Any) -> tuple[str, str | None]:
    """The answer's text, and its session."""
    body = {"model": model, "messages": [{"role": r, "content": c} for r, c in messages], "max_tokens": 24}
    body |= {"logit_bias": {"0": -100, "2": -100}, "logprobs": True, **fields}
    answer = served.ask("POST", CHAT, body, {"Idempotency-Key": hashlib.sha256(repr(messages).encode()).hexdigest()})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"], answer.headers.get("x-ssmd-session")


def test_no_store(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    """A whole daemon: its data directory, its temporary files, what it logs."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with running(tmp_path, str(artifact), "--no-store", "--log-level", "debug") as (process, served):
        model = served.ask("GET", "/v1/models").json["data"][0]["id"]
        first, session = chat(served, model, ("system", SECRET), ("user", SECRET))
        again, _ = chat(served, model, ("system", SECRET), ("user", SECRET), ("assistant", first), ("user", SECRET))
        assert served.ask("POST", CHAT, {"model": model, "messages": SECRET}).status == 400
        assert session is None
        assert traces(tmp_path, SECRET, first, again, tokenizer=tokenizer) == []
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert traces(tmp_path, SECRET, first, again, tokenizer=tokenizer) == []
    assert SECRET not in log
    assert list((tmp_path / "data").rglob("*sqlite*")) == []


def test_store_false(artifact: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with daemon(artifact, tmp_path / "data") as one:
        assert one.store is not None
        kept, session = chat(one.served, one.model, ("user", "keep this, it is the first of all questions"))
        quiet(one)  # an answer that its own text does not spell is read once more
        before = one.store.bytes_stored()
        hidden, _ = chat(one.served, one.model, ("user", SECRET), store=False)
        old = (("user", "keep this, it is the first of all questions"), ("assistant", kept))
        more, _ = chat(one.served, one.model, *old, ("user", SECRET), store=False, session=session)
        quiet(one)
        assert one.store.bytes_stored() == before
        assert traces(tmp_path, SECRET, hidden, more, tokenizer=tokenizer) == []
        assert traces(tmp_path, "keep this, it is the first", tokenizer=tokenizer) != [], (
            "the search finds what is there"
        )
    assert traces(tmp_path, SECRET, hidden, more, tokenizer=tokenizer) == []


def test_removed_while_the_daemon_runs(artifact: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with daemon(artifact, tmp_path / "data") as one:
        assert one.store is not None
        stays, _ = chat(one.served, one.model, ("user", "this one stays"))
        answer, session = chat(one.served, one.model, ("system", SECRET * 3), ("user", SECRET))
        path = [("system", SECRET * 3), ("user", SECRET), ("assistant", answer), ("user", "why under the third stair?")]
        second, _ = chat(one.served, one.model, *path)
        gone = (SECRET, answer, second, "why under the third stair?")
        quiet(one)  # an answer that its own text does not spell is read once more, which adds a state
        with one.store.reading() as connection:
            query = (
                "SELECT p.data, t.session FROM piece p JOIN turn_checkpoint tc ON tc.checkpoint = p.checkpoint "
                "JOIN turn t ON t.id = tc.turn"
            )
            rows = connection.exec_driver_sql(query).all()
        states = [row.data for row in rows if row.session == session]
        others = b"".join(row.data for row in rows if row.session != session)  # which end in the same tokens
        assert states
        exported = tmp_path / "elsewhere"
        exported.mkdir()
        assert one.served.ask("GET", f"/ssmd/v1/sessions/{session}/export").status == 200
        assert {secret for _, secret in traces(tmp_path, *gone)} == set(gone), "the search finds what is there"
        assert one.served.ask("DELETE", f"/ssmd/v1/sessions/{session}").status == 200
        assert traces(tmp_path, *gone, tokenizer=tokenizer) == []
        for file in (tmp_path / "data").iterdir():
            raw = file.read_bytes()
            for state in states:
                windows = [state[at : at + 64] for at in range(4096, len(state), 4096)]
                assert not [w for w in windows if w in raw and w not in others]
        assert traces(tmp_path, "this one stays") != []
        assert chat(one.served, one.model, ("user", "this one stays"))[0] == stays
    assert traces(tmp_path, *gone, tokenizer=tokenizer) == []


def test_removed_by_the_command(artifact: Path, tmp_path: Path) -> None:
    with daemon(artifact, tmp_path / "data") as one:
        _, session = chat(one.served, one.model, ("user", SECRET))
        assert session is not None
        quiet(one)  # a concurrent reader puts the erasing off
        done = commands.ssmd("session", "rm", session, env=environment(tmp_path))
        assert done.returncode == 0, done.stderr
        assert traces(tmp_path, SECRET) == []


def test_the_daemon_erases_what_a_removal_left_undone(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon gets no more requests."""
    monkeypatch.setattr("ssmd.engine.persist.writer.LOOK_S", 1.0)
    with daemon(artifact, tmp_path / "data") as one:
        _, session = chat(one.served, one.model, ("user", SECRET))
        reader = sqlite3.connect(tmp_path / "data" / FILE, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM turn").fetchall()
        assert one.served.ask("DELETE", f"/ssmd/v1/sessions/{session}").status == 200
        time.sleep(0.5)
        assert isinstance(one.engine._persistence, Persistence)
        one.engine._persistence._writer.flush()  # it tried, and has nothing to do
        assert traces(tmp_path, SECRET) != []
        reader.close()
        soon(lambda: traces(tmp_path, SECRET) == [])


def test_a_reader_in_the_way_only_puts_it_off(tmp_path: Path) -> None:
    """While another process reads, the log cannot be emptied. The file notes what is owed for its next user."""
    store = Store.open(tmp_path / "data", busy_ms=50)
    chat = Chat(store, "ses_1")
    chat.say("t1", None, SECRET, "yes")
    reader = sqlite3.connect(tmp_path / "data" / FILE, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM turn").fetchall()
    store.delete("ses_1")
    assert traces(tmp_path, SECRET) != []
    reader.close()
    other = Store.open(tmp_path / "data")
    other.settle()
    assert traces(tmp_path, SECRET) == []
    assert sqlite3.connect(tmp_path / "data" / FILE).execute("PRAGMA user_version").fetchone() == (0,)
    other.close()
    store.close()


def test_no_copy_stays_in_the_free_part_of_a_page(tmp_path: Path) -> None:
    """Where turns come and go, SQLite moves rows between pages to fill them, and leaves copies where they were.

    With SQLite 3.40 this course of events leaves one, where only rows and pages are zeroed; few do.
    """
    rng, store = random.Random(0), new_store(tmp_path / "data")
    chats: dict[str, Chat] = {}
    gone: list[str] = []
    n = 0
    for _ in range(300):
        if chats and rng.random() < 0.1:
            gone.append(rng.choice(list(chats)))
            del chats[gone[-1]]
            store.delete(gone[-1])
            continue
        if chats and rng.random() < 0.75:
            chat = rng.choice(list(chats.values()))
        else:
            n += 1
            chat = chats[f"ses_{n}"] = Chat(store, f"ses_{n}")
        mark = f"<{chat.info.id}> " * rng.choice([1, 1, 3, 30, 200, 1500])
        above = next(reversed(chat.turns), None)
        turn, _checkpoints = chat.make(f"{chat.info.id}_{len(chat.turns)}", above, [user(mark)], mark[:1000])
        store.commit([turn], session=chat.info)
        chat.remember(turn, None)
    assert traces(tmp_path, *(f"<{session}>" for session in gone)) == []
    assert len(traces(tmp_path, *(f"<{session}>" for session in chats))) >= len(chats) > 10
    store.close()


def test_what_a_killed_import_left(artifact: Path, tmp_path: Path) -> None:
    Store.open(tmp_path / "data").close()
    (tmp_path / "data" / ".transfer-00.ssmd").write_text(SECRET)
    with daemon(artifact, tmp_path / "data"):
        assert traces(tmp_path, SECRET) == []


def test_what_a_killed_export_left(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        for file in (tmp_path / "data").glob(".*.ssmd-part"):  # as it is when the power goes
            (tmp_path / "stays").mkdir()
            shutil.copy(file, tmp_path / "stays" / file.name)
        raise OSError

    with daemon(artifact, tmp_path / "data") as one:
        _, session = chat(one.served, one.model, ("user", SECRET))
        monkeypatch.setattr(transfer, "_publish", killed)
        one.served.ask("GET", f"/ssmd/v1/sessions/{session}/export")
        one.served.ask("DELETE", f"/ssmd/v1/sessions/{session}")
    for file in (tmp_path / "stays").iterdir():
        file.rename(tmp_path / "data" / file.name)
    assert [name for name, _ in traces(tmp_path, SECRET)] != []
    with daemon(artifact, tmp_path / "data"):
        assert traces(tmp_path, SECRET) == []


@pytest.fixture(params=[0o000, pytest.param(0o022, marks=pytest.mark.full), 0o077])  # which lies between
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {
        str(f.relative_to(folder)): stat.S_IMODE(f.stat().st_mode)
        for f in folder.rglob("*")
        if not f.name.startswith("lock")
    }


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_modes(artifact: Path, tmp_path: Path, umask: int) -> None:
    home = tmp_path / "new"
    with running(tmp_path, str(artifact), "--data-dir", str(home / "share" / "ssmd")) as (_, served):
        model = served.ask("GET", "/v1/models").json["data"][0]["id"]
        _, session = chat(served, model, ("user", SECRET))
        exported = served.ask("GET", f"/ssmd/v1/sessions/{session}/export")
        served.ask("POST", "/ssmd/v1/sessions/import", exported.body, {"content-type": "application/octet-stream"})
        seen = modes(home)
    assert {f"share/ssmd/{FILE}", f"share/ssmd/{FILE}-wal", f"share/ssmd/{FILE}-shm"} <= set(seen)
    for name, mode in seen.items():
        assert mode == (0o700 if (home / name).is_dir() else 0o600), (name, oct(mode))


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_mode_of_an_exported_file(tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ssmd = Ssmd(tmp_path, monkeypatch)
    store = Store.open(ssmd.data)
    Chat(store, "ses_1").say("t1", None, SECRET, "yes")
    ssmd("export", "ses_1", "chat.ssmd")
    store.close()
    assert stat.S_IMODE((tmp_path / "chat.ssmd").stat().st_mode) == 0o600
    assert [f.name for f in tmp_path.iterdir() if f.name.endswith(".tmp")] == []
