"""The file of keys: how it is read, which callers it lets in, and that a daemon takes up changes in it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from daemon import soon
from keyfile import bearer, written
from openai_client import openai
from serving import Answer, Served, serving
from several import Events
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from test_server import failing, running

from ssmd.api.http.access import MAX_FILE_BYTES, MAX_KEYS, Caller, Keys, caller_of, read_keys
from ssmd.api.http.security import PathRules, Rules, guarded
from ssmd.config import Settings, SettingsError
from ssmd.sessions.rows.database import FILE as DATABASE
from ssmd.sessions.turn import EVERYBODY, NOBODY, Domain

ALICE, OLD, BOB, SCREEN = "alice-has-this-one", "alice-had-this-one", "bob-has-this-one", "screens-look-at-this"
FILE = f"""\
# who may ask
alice {ALICE}
alice\t{OLD}

  bob {BOB}\r
screen {SCREEN} read-only
"""


def test_names_keys_and_what_they_may(tmp_path: Path) -> None:
    found = read_keys(written(tmp_path / "keys", FILE))
    assert [(key.name, key.read_only) for key in found] == [
        ("alice", False),
        ("alice", False),
        ("bob", False),
        ("screen", True),
    ]
    assert ALICE not in repr(found)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_keys_file_written_on_windows_is_read(encoding: str, tmp_path: Path) -> None:
    file = written(tmp_path / "keys", FILE)
    keys = read_keys(file)
    file.write_bytes(FILE.encode(encoding))
    assert read_keys(file) == keys
    file.write_bytes(FILE.encode(encoding) + b"\xff")
    with pytest.raises(SettingsError, match=f"is not {encoding.upper().removesuffix('-SIG')}"):
        read_keys(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds 0 keys"),
        ("# nobody\n", "holds 0 keys"),
        (f"alice {ALICE}\nbob\n", "line 2"),
        (f"alice {ALICE} read-write\n", "line 1"),
        (f"alice {ALICE} read-only # for the screen\n", "line 1"),
        (f"al.ice {ALICE}\n", "a name is"),
        (f"{'a' * 65} {ALICE}\n", "a name is"),
        ("alice short12\n", "a key is 8"),
        ("alice schlüsselwort\n", "a key is 8"),
        (f"alice {'x' * 513}\n", "a key is 8"),
        (f"alice {ALICE}\nbob {ALICE}\n", "line 2 .*same key"),
        ("".join(f"n{i} a-long-key-{i}\n" for i in range(MAX_KEYS + 1)), f"holds {MAX_KEYS + 1} keys"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_what_is_no_file_of_keys(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        read_keys(written(tmp_path / "keys", text))
    assert not any(key in str(refused.value) for key in (ALICE, "short12", "schlüsselwort"))


def test_what_is_no_file_at_all(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for file, said in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "directory|not a file"),
        (tmp_path / "pipe", "no"),
    ):
        with pytest.raises(SettingsError, match=said):
            read_keys(file)
    file = tmp_path / "bytes"
    file.write_bytes(b"alice \xff\xfe\n")
    file.chmod(0o600)
    with pytest.raises(SettingsError, match="not text"):
        read_keys(file)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602])
def test_a_file_that_others_may_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="chmod 600"):
        read_keys(written(tmp_path / "keys", FILE, mode))


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "keys", FILE)
    os.chown(file, 12345, -1)
    with pytest.raises(SettingsError, match="belongs to user 12345"):
        read_keys(file)


def test_one_key_and_a_file_of_them_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--api-keys-file .*there is an api_key too"):
        Settings(api_key=ALICE, api_keys_file=tmp_path / "keys")


def test_with_a_file_of_keys_others_may_reach_it(tmp_path: Path) -> None:
    Settings(host="0.0.0.0", api_keys_file=tmp_path / "keys").check_exposure()
    assert Settings(allowed_origins="*", api_keys_file=tmp_path / "keys").keyed


def test_who_asks_is_known_by_the_key(tmp_path: Path) -> None:
    keys = Keys.of(Settings(api_keys_file=written(tmp_path / "keys", FILE)))
    assert (
        keys.caller(f"Bearer {ALICE}")
        == keys.caller(f"bearer  {OLD}")
        == Caller(Domain("alice", ("alice", "")), several=True)
    )
    assert keys.caller(f"Bearer {SCREEN}") == Caller(Domain("screen", ("screen",)), several=True, read_only=True)
    assert Keys.of(Settings(api_key=ALICE)).caller(f"Bearer {ALICE}") == Keys.of(Settings()).caller("")
    assert Keys.of(Settings()).caller("").domain == EVERYBODY
    assert Caller().domain == NOBODY, "of whom no key was asked, as at /health"
    shared = Keys.of(Settings(api_keys_file=tmp_path / "keys", share_sessions=True))
    assert shared.caller(f"Bearer {BOB}").domain == Domain("bob", None)
    alone = Keys.of(Settings(api_keys_file=written(tmp_path / "keys", f"alice {ALICE}\nalice {OLD}\n")))
    assert alone.caller(f"Bearer {OLD}") == Caller(Domain("alice", ("alice", "")))


def test_a_key_is_compared_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them it is, and if it is none, as many comparisons are made."""
    import hmac

    keys = Keys.of(Settings(api_keys_file=written(tmp_path / "keys", FILE)))
    made, compare = list[int](), hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        made.append(len(a) + len(b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for given in (ALICE, BOB, SCREEN):
        keys.caller(f"Bearer {given}")
    with pytest.raises(Exception, match="is wrong"):
        keys.caller("Bearer x")
    assert made == [64] * 16


@pytest.fixture
def rules_of(tmp_path: Path) -> Callable[[], Rules]:
    file = written(tmp_path / "keys", FILE)
    paths = PathRules(keyless=frozenset({"/health"}))
    return lambda: Rules(frozenset({"127.0.0.1"}), keys=Keys.of(Settings(api_keys_file=file)), paths=paths)


@pytest.fixture
def served(rules_of: Callable[[], Rules]) -> Iterator[Served]:
    async def name(request: Request) -> JSONResponse:
        return JSONResponse({"name": caller_of(request.scope).name})

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    with serving(guarded([Route("/name", name, methods=methods), Route("/health", name)], rules_of())) as one:
        yield one


def test_each_key_is_answered_by_its_name(served: Served) -> None:
    for key, name in ((ALICE, "alice"), (OLD, "alice"), (BOB, "bob"), (SCREEN, "screen")):
        assert served.ask("GET", "/name", headers=bearer(key)).json == {"name": name}
    for given in ({}, bearer(ALICE[:-1]), bearer(ALICE + "x"), bearer("alice"), {"authorization": f"Basic {ALICE}"}):
        answer = served.ask("GET", "/name", headers=given)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert served.ask("GET", "/health").json == {"name": ""}


def test_a_read_only_key_changes_nothing(served: Served) -> None:
    assert served.ask("HEAD", "/name", headers=bearer(SCREEN)).status == 200
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"):
        answer = served.ask(method, "/name", headers=bearer(SCREEN))
        assert (answer.status, answer.error["code"]) == (403, "read_only_key")
        assert "screen" in answer.error["message"]
    assert served.ask("POST", "/name", {}, bearer(BOB)).json == {"name": "bob"}


def test_a_file_that_is_broken_leaves_the_keys_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path / "keys", FILE)
    keys = Keys.of(Settings(api_keys_file=file))
    for broken, mode in (("alice short\n", 0o600), ("", 0o600), (FILE, 0o644)):
        written(file, broken, mode)
        caplog.clear()
        keys.reread()
        assert keys.caller(f"Bearer {BOB}").name == "bob"
        assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_daemon_takes_up_other_keys_when_it_is_told(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    file = written(tmp_path / "keys", FILE)
    extra = {"SSMD_API_KEYS_FILE": str(file)}
    with running(tmp_path, str(artifacts["llama-f32"]), "--no-store", extra=extra) as (process, served):

        def models(key: str) -> Answer:
            return served.ask("GET", "/v1/models", headers=bearer(key))

        assert openai("key", served.url, {"keys": [ALICE, OLD, SCREEN, "wrong"]}) == {
            **dict.fromkeys([ALICE, OLD, SCREEN], "ok"),
            "wrong": "invalid_api_key",
        }
        written(file, f"alice {ALICE}\ncarol carol-is-new-here\n")
        assert models(OLD).status == 200  # the daemon has had no SIGHUP yet
        with Events(served, bearer(OLD)) as gone, Events(served, bearer(ALICE)) as stays:
            soon(lambda: bool(gone.found and stays.found))
            process.send_signal(signal.SIGHUP)
            soon(lambda: models("carol-is-new-here").status == 200)
            assert (models(OLD).status, models(BOB).status, models(ALICE).status) == (401, 401, 200)
            seen = len(gone.found)
            served.ask("POST", "/v1/chat/completions", {"model": "x"}, headers=bearer(ALICE))  # which is news
            assert gone.ended.wait(20)
            soon(lambda: len(stays.found) > 1)
            assert (len(gone.found), stays.ended.is_set()) == (seen, False)
        written(file, "alice\n")
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        while "are unchanged" not in (line := process.stderr.readline()):
            assert line
        assert "ERROR" in line
        assert (models(ALICE).status, models(OLD).status) == (200, 401)


def test_a_key_that_goes_takes_its_sealed_states_along(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """At a SIGHUP, and at the start if it went while no daemon ran."""
    file = written(tmp_path / "keys", f"alice {ALICE}\nbob {BOB}\ncarol carol-is-new-here\n")
    extra = {"SSMD_API_KEYS_FILE": str(file)}
    model = str(artifacts["llama-f32"])
    body = {"model": "llama", "messages": [{"role": "user", "content": "Who is there? " * 20}], "store": False}

    def owners() -> set[str]:
        with contextlib.closing(sqlite3.connect(tmp_path / "data" / DATABASE)) as other:
            return {owner for (owner,) in other.execute("SELECT owner FROM checkpoint WHERE kind = 'sealed'")}

    with running(tmp_path, model, extra=extra) as (process, served):
        for key in (ALICE, BOB, "carol-is-new-here"):
            answer = served.ask("POST", "/v1/chat/completions", {**body, "max_tokens": 1}, headers=bearer(key))
            assert answer.status == 200
        assert owners() == {"alice", "bob", "carol"}
        written(file, f"alice {ALICE}\nbob {BOB}\n")
        process.send_signal(signal.SIGHUP)
        soon(lambda: owners() == {"alice", "bob"})
    written(file, f"alice {ALICE}\n")
    with running(tmp_path, model, extra=extra):
        soon(lambda: owners() == {"alice"})


def test_a_daemon_does_not_start_without_its_keys(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    file = written(tmp_path / "keys", FILE, 0o644)
    model = str(artifacts["llama-f32"])
    assert f"chmod 600 {file}" in failing(tmp_path, model, extra={"SSMD_API_KEYS_FILE": str(file)})
    both = {"SSMD_API_KEYS_FILE": str(file), "SSMD_API_KEY": ALICE}
    assert "there is an api_key too" in failing(tmp_path, model, extra=both)
