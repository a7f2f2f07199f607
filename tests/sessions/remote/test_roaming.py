"""Two real daemons, each with its data directory, and one folder: a conversation goes on at either of them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import commands
import pytest
from conftest import TinyArtifacts
from forked import DaemonProcess
from keeping import lay_store
from remotes import Place

from ssmd.sessions.fsck.repair import check
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Turn, conversation

Messages = list[dict[str, str]]
# A busy computer takes longer than a request waits for a remote that is well.
PATIENT = "from ssmd.sessions.remote import link; link.ASK_S = link.FETCH_S = link.LEAST_S = 30.0"


class Machine:
    """A machine of one user: a data directory, and the daemon over it."""

    def __init__(self, at: Path, artifact: Path, remote: Path | str) -> None:
        self.data, self.name = at, ""
        lay_store(at)
        self.daemon = DaemonProcess(artifact, at, "--remote", str(remote))
        self.daemon.before = PATIENT

    def say(self, said: Messages, text: str, **fields: Any) -> dict[str, Any]:
        """Go on with a conversation, whose messages then end with the answer. Returns ssmd's usage."""
        said.append({"role": "user", "content": text})
        reply = self.daemon.chat(said, max_tokens=6, **fields)
        said.append({"role": "assistant", "content": reply.text})
        own: dict[str, Any] = reply.usage["ssmd"] | {"session": reply.session}
        return own | {"cached": reply.usage["prompt_tokens_details"]["cached_tokens"]}

    def remote(self) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.get("/health")[1]["remote"]
        return found

    def sent(self) -> None:
        until(lambda: self.remote()["waiting"] == 0 and self.remote()["status"] == "ok")

    def killed(self) -> None:
        """Kill the daemon when all is sent, and start it again."""
        self.sent()
        self.daemon.kill()
        self.daemon.start()

    def turns(self, session: str) -> list[Turn]:
        store = Store.open(self.data)
        try:
            return store.turns(session)
        finally:
            store.close()

    def command(self, *words: str, of: str = "session") -> subprocess.CompletedProcess[str]:
        return commands.ssmd(of, *words, env={**os.environ, "SSMD_DATA_DIR": str(self.data)})


def until(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "remote"
    made.mkdir(mode=0o700)
    return made


@contextmanager
def machines(tmp_path: Path, artifact: Path, folder: Path | str) -> Iterator[tuple[Machine, Machine]]:
    both = Machine(tmp_path / "a", artifact, folder), Machine(tmp_path / "b", artifact, folder)
    with both[0].daemon, both[1].daemon:
        yield both


def said_in(turns: list[Turn]) -> Messages:
    return [{"role": m.role, "content": m.content} for m in conversation(turns)]


def test_a_conversation_goes_on_at_either_daemon(artifacts: TinyArtifacts, tmp_path: Path, folder: Path) -> None:
    """Each is killed in turn; what it had reported as stored comes to the other from its next start on."""
    said: Messages = []
    with machines(tmp_path, artifacts["llama-f32"], folder) as (a, b):
        session = a.say(said, "Tell me of a river.")["session"]
        for here, there in ((a, b), (b, a), (a, b)):
            here.daemon.kill()
            here.daemon.start()
            here.sent()
            own = there.say(said, "And then?")
            assert own["session"] == session
            assert own["stored"]
            assert own["remote"] in ("waiting", "sent")
        b.sent()
        own = a.say(said, "The end?")
        assert own["session"] == session
        assert own["resume"] == "exact"  # of what it has itself; the rest is read
        assert own["cached"] > 0
        a.sent()
    assert [t.parent is None for t in a.turns(session)] == [True] + [False] * 4
    assert said_in(a.turns(session)) == said
    for one in (a, b):
        assert not check(one.data).damages


@pytest.mark.parametrize("place", ["folder", "postgres", pytest.param("bucket", marks=pytest.mark.full)], indirect=True)
@pytest.mark.parametrize("model", [pytest.param("granite-f32", marks=pytest.mark.full), "mamba-f32"])
def test_a_state_goes_where_the_conversation_goes(
    model: str, artifacts: TinyArtifacts, tmp_path: Path, place: Place
) -> None:
    """Each daemon is killed in turn, then both go on without the remote. All that was fed before is cached there."""
    said: Messages = []

    def ends() -> list[str]:
        return [name.rpartition("/")[2] for name in place.rows() if name.startswith(("ends/", "ending/"))]

    def moved(here: Machine, there: Machine, said: Messages) -> dict[str, Any]:
        """Wait until the state of the last turn is in the remote, kill its daemon, and go on at the other one."""
        turn = here.turns(session)[-1]
        until(lambda: turn.id in ends())
        here.killed()
        own = there.say(said, "And then?")
        print(f"{model}: {own['cached']} cached tokens of {len(turn.ids)}, {own['resume']}")
        assert own["session"] == session
        assert (own["cached"], own["resume"]) == (len(turn.ids) - 1, "exact")  # the last token is fed next
        return own

    with machines(tmp_path, artifacts[model], place.setting) as (a, b):
        session = a.say(said, "Tell me of a river. " + "It flows, and it bends. " * 12)["session"]
        moved(a, b, said)
        moved(b, a, said)
        assert len(ends()) == 1
        a.sent()
        at_b = list(said)
        place.go_away()
        b.say(at_b, "In winter?")
        a.say(list(said), "In summer?")
        until(lambda: a.remote()["status"] == b.remote()["status"] == "unreachable")
        place.come_back()
        for one in (a, b):
            one.daemon.stop()
            one.daemon.start()
        moved(b, a, at_b)
        a.sent()
    for one in (a, b):
        assert not check(one.data).damages


@pytest.mark.parametrize("trusts", [True, False], ids=["trusted", "unknown"])
def test_a_trusted_machines_state_serves_others(
    trusts: bool, artifacts: TinyArtifacts, tmp_path: Path, place: Place
) -> None:
    """Another conversation at the second machine begins with the ids of the first one's: bits are as at the first."""
    said: Messages = []
    with machines(tmp_path, artifacts["mamba-f32"], place.setting) as (a, b):
        if trusts:
            key = a.command("key", of="store").stdout.strip()
            assert b.command("trust", key, "--name", "a", of="store").returncode == 0
        session = a.say(said, "Tell me of a river. " + "It flows, and it bends. " * 12)["session"]
        a.sent()
        a.daemon.stop()  # it sends the state first
        [turn] = a.turns(session)
        assert b.say(said, "And then?")["cached"] == len(turn.ids) - 1
        a.daemon.start()
        other = {"prompt": turn.ids.own.tolist(), "max_tokens": 8, "temperature": 0, "logprobs": 3}
        here, there = (_completed(one, other) for one in (b, a))
        print(f"trusts: {trusts}; {here[0]} cached tokens of {len(turn.ids)}, at the state's maker {there[0]}")
        assert (here[0], there[0]) == (len(turn.ids) - 1 if trusts else 0, len(turn.ids) - 1)
        assert here[1] == there[1]
        if trusts:
            removed = json.loads(b.command("distrust", key, "--json", of="store").stdout)["states"]
            assert removed > 1  # with those of the turn that the second one made
            assert _completed(b, other) == (0, here[1])
            assert b.turns(session)[0].id == turn.id
    for one in (a, b):
        assert not check(one.data).damages


def _completed(machine: Machine, body: dict[str, Any]) -> tuple[int, object]:
    """Complete a prompt that is of no conversation. Returns the tokens that were cached, and the answer's bits."""
    model = machine.daemon.get("/v1/models")[1]["data"][0]["id"]
    done = machine.daemon.post("/v1/completions", {"model": model} | body)
    [choice] = done["choices"]
    return done["usage"]["prompt_tokens_details"]["cached_tokens"], (choice["text"], choice["logprobs"])


def test_a_daemon_does_not_start_with_a_damaged_key(artifacts: TinyArtifacts, tmp_path: Path, folder: Path) -> None:
    lay_store(tmp_path / "a")
    key = tmp_path / "a" / "machine.key"
    key.touch(0o600)
    words = ("serve", str(artifacts["llama-f32"]), "--port", "0", "--remote", str(folder))
    done = commands.ssmd(*words, env={**os.environ, "SSMD_DATA_DIR": str(tmp_path / "a")})
    assert done.returncode == 1
    assert f"this machine's key {key} is damaged" in done.stderr
    assert key.read_bytes() == b""


def test_branches_made_offline_are_both_kept(artifacts: TinyArtifacts, tmp_path: Path, folder: Path) -> None:
    said: Messages = []
    away = tmp_path / "away"
    with machines(tmp_path, artifacts["llama-f32"], folder) as (a, b):
        session = a.say(said, "Tell me of a river.")["session"]
        a.sent()
        b.say(list(said), "In spring?")  # it has the first turn, and both have the same
        b.sent()
        folder.rename(away)
        at_a, at_b = list(said), list(said)
        a.say(at_a, "In summer?")
        b.say(at_b, "In winter?")
        until(lambda: a.remote()["status"] == b.remote()["status"] == "unreachable")
        assert a.remote()["waiting"] == b.remote()["waiting"] == 1
        away.rename(folder)
        for one in (a, b):
            one.daemon.stop()
            one.daemon.start()
            one.sent()
        for one in (a, b):
            done = one.command("pull", session, "--remote", str(folder))
            assert done.returncode == 0, done.stderr
        assert b.say(at_a, "And in autumn?")["session"] == session
    for one in (a, b):
        asked = {t.messages[-1].content for t in one.turns(session)}
        assert {"Tell me of a river.", "In spring?", "In summer?", "In winter?"} <= asked
        assert not check(one.data).damages


def test_a_removed_session_never_returns(artifacts: TinyArtifacts, tmp_path: Path, folder: Path) -> None:
    said: Messages = []
    with machines(tmp_path, artifacts["llama-f32"], folder) as (a, b):
        session = a.say(said, "A secret of rivers.")["session"]
        a.sent()
        assert b.say(said, "And then?")["session"] == session
        b.sent()
        b.daemon.stop()
        assert a.command("rm", session).returncode == 0
        a.daemon.kill()
        a.daemon.start()
        until(lambda: (folder / "buried" / session).exists() and a.remote()["waiting"] == 0)
        assert not any(b"secret of rivers" in f.read_bytes() for f in folder.rglob("*") if f.is_file())
        b.daemon.start()
        b.sent()
        until(lambda: b.command("show", session).returncode == 1)
        again = b.say(said, "Do you know it?")
        assert again["session"] != session
        assert b.command("pull", session, "--remote", str(folder)).returncode == 1
    for one in (a, b):
        assert not check(one.data).damages


def test_what_is_not_to_be_shared_stays(artifacts: TinyArtifacts, tmp_path: Path, folder: Path) -> None:
    with machines(tmp_path, artifacts["llama-f32"], folder) as (a, _):
        own = a.say([], "A word that is not kept.", store=False)
        assert (own["stored"], own["remote"]) == (False, "off")
        said: Messages = []
        session = a.say(said, "A word for later.")["session"]
        a.sent()
        assert a.command("local", session).returncode == 0
        assert a.say(said, "A word for here.")["remote"] == "off"
        text = b"".join(f.read_bytes() for f in folder.rglob("*") if f.is_file())
        assert b"A word for later." in text
        assert b"not kept" not in text
        assert b"A word for here." not in text


def test_an_older_session_goes_by_push_alone(artifacts: TinyArtifacts, tmp_path: Path, folder: Path) -> None:
    path, said = artifacts["llama-f32"], list[dict[str, str]]()
    a, b = Machine(tmp_path / "a", path, folder), Machine(tmp_path / "b", path, folder)
    with DaemonProcess(path, a.data) as before:
        first, a.daemon = a.daemon, before
        own = a.say(said, "From before the remote.")
        assert "remote" not in own
        assert "remote" not in before.get("/health")[1]
        a.daemon = first
    with a.daemon, b.daemon:
        assert a.say(said, "With the remote.")["remote"] == "off"
        assert not list(folder.glob("sessions/*/*/*"))
        counted = a.command("push", own["session"], "--dry-run", "--json", "--remote", str(folder))
        assert json.loads(counted.stdout)["turns"] == 2
        assert not list(folder.glob("sessions/*/*/*"))
        done = a.command("push", "--all", "--remote", str(folder))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("2 turns of 1 session, 0.0 MB, to ")
        assert b.say(said, "And here?")["session"] == own["session"]
        assert a.say(list(said), "Back again?")["remote"] in ("waiting", "sent")
