"""Commands, and a daemon that says something else than docs/http.md does: one of another version, or one that lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pexpect
import pytest
from standing import standing_in
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from terminal import terminal
from test_server import environment

from ssmd.cli.chat.loop import stats_line
from ssmd.cli.chat.talk import ChatReply, conversation
from ssmd.daemon.answers import SESSIONS, fits

BAD = "\x1b]0;x\x07\n\u202eerror: \x9b2J"
TURN = {
    "id": "t",
    "parent": None,
    "messages": [{"role": "user", "content": BAD}, {"role": "assistant", "content": BAD}],
}
SESSION = {"id": BAD.replace("\n", ""), "model": BAD, "title": BAD, "turn_count": 1, "last_used": 0}
LIES = {
    "/v1/models": {"data": [{"id": BAD}]},
    "/ssmd/v1/models": {"data": [{"id": "x", "name": BAD, "state": "loaded"}]},
    "/ssmd/v1/sessions": {"data": [SESSION], "has_more": False},
}
LIES_OF_A_SESSION = {**SESSION, "head": "t", "turns": [{**TURN, "finish_reason": BAD, "complete": True}]}


class Daemon:
    """A server in a daemon's place. answer: its reply to everything; None: lies, and refusals of all posts."""

    def __init__(self, folder: Path) -> None:
        self.answer: Any = None
        self.env = environment(folder)

    async def all(self, request: Request) -> JSONResponse:
        if self.answer is not None:
            return JSONResponse(self.answer)
        if request.method == "POST":
            return JSONResponse({"error": {"message": BAD, "code": BAD}}, 500)
        path = request.url.path
        return JSONResponse(LIES_OF_A_SESSION if path.startswith("/ssmd/v1/sessions/") else LIES.get(path, {}))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    one = Daemon(tmp_path)
    app = Starlette(routes=[Route("/{path:path}", one.all, methods=["GET", "POST"])])
    with standing_in(tmp_path / "data", app):
        yield one


@pytest.mark.parametrize("answer", [{}, [], {"data": [{}]}])
def test_what_it_does_not_say_is_a_line(daemon: Daemon, answer: Any) -> None:
    daemon.answer = answer
    for command in (["stop", "m"], ["run", "m", "x"], ["run", "m", "x", "-c"], ["run", "m", "x", "--session", "s"]):
        done = commands.ssmd(*command, env=daemon.env)
        assert done.returncode == 1, command
        assert done.stderr.splitlines()[-1].endswith(" does not answer like a daemon of ssmd"), (command, done.stderr)
        assert "Traceback" not in done.stderr


def test_nothing_that_it_says_steers_the_terminal(daemon: Daemon) -> None:
    for command in (["stop", "x"], ["run", "m", "x"], ["run", "m", "x", "--session", "s"]):
        said = commands.ssmd(*command, env=daemon.env).stderr
        assert all(c.isprintable() or c == "\n" for c in said), (command, said)
        assert said.splitlines()[-1].startswith("error: ")
    with terminal("$SSMD run m", daemon.env) as chat:
        chat.until("tells more")
        for line in ("/sessions", "/session 1", "/session", "/tree", "/fork", "/model", "Hello"):
            chat.line(line)
        chat.type("\x15\x04")
        chat.child.expect(pexpect.EOF)
        shown = str(chat.child.before)
    assert "continue with" in shown
    assert "\x1b]" not in shown
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)


def test_numbers_and_times_that_are_none() -> None:
    for used in (float("nan"), 1e300, -1, "x", None, True):
        assert not fits({"data": [{**SESSION, "last_used": used}], "has_more": False}, SESSIONS), used
    usage = {"prompt_tokens": "x", "prompt_tokens_details": [], "ssmd": {"tbt_ms": 0, "ttft_ms": None, "resume": BAD}}
    assert stats_line(ChatReply("", None, usage, True, True)).isprintable()


def test_a_tree_that_goes_in_a_circle_ends() -> None:
    turns: list[dict[str, Any]] = [
        {"id": "a", "parent": "b", "messages": ["1"]},
        {"id": "b", "parent": "a", "messages": ["2"]},
    ]
    assert [*conversation(turns, "a")] == turns[1]["messages"] + turns[0]["messages"]
