"""What ssmd is for: a daemon that was killed continues its conversations, exactly and without reading them again."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path

import commands
import pytest
from conftest import TinyArtifacts
from daemon_process import DaemonProcess, Reply

from ssmd.sessions.store import Store
from ssmd.sessions.turn import Turn

SYSTEM = {"role": "system", "content": "You are the keeper of a lighthouse and you answer in few words."}
QUESTIONS = (
    "The capital of France is Paris. What is the capital of Italy?",
    "Tell me a story about a river, a bridge and the people who cross it.",
    "And why does it remember the whole conversation?",
)
TEMPLATE_TOKENS = (
    12  # <|im_end|> \n <|im_start|> user \n … <|im_end|> \n <|im_start|> assistant \n in the tiny vocabulary
)
KILLS = int(os.environ.get("SSMD_KILLS", "6"))

SAMPLING = {"temperature": 1.0, "seed": 7}  # greedy, a random model says one token for ever
MODELS = (  # of the others tests/contract/test_resume.py, test_portable.py and tests/engine say as much
    "granite-int8",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("llama-f32", "granite-f32", "openvino-granite-int8")),
)


def say(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def talk(daemon: DaemonProcess, turns: int, *, before_last: Callable[[], None] = lambda: None) -> list[Reply]:
    """A conversation by a client that sends all of it every time; the calls of two such talks are the same."""
    messages, replies = [SYSTEM], []
    for i in range(turns):
        if i == turns - 1:
            before_last()
        messages.append(say(QUESTIONS[i]))
        reply = daemon.chat(messages, max_tokens=24, logprobs=True, top_logprobs=5, **SAMPLING)
        messages.append(say(reply.text, "assistant"))
        replies.append(reply)
    return replies


def fed(reply: Reply) -> int:
    return int(reply.usage["prompt_tokens"] - reply.usage["prompt_tokens_details"]["cached_tokens"])


def restart(daemon: DaemonProcess) -> Callable[[], None]:
    def work() -> None:
        daemon.kill()
        daemon.start()

    return work


@pytest.mark.parametrize("model", MODELS)
def test_a_killed_daemon_continues_exactly(model: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    path = artifacts[model]
    with DaemonProcess(path, tmp_path / "a") as daemon:
        killed = talk(daemon, 3, before_last=restart(daemon))
    with DaemonProcess(path, tmp_path / "b") as daemon:
        whole = talk(daemon, 3)
    last = killed[-1]
    assert last.usage["ssmd"]["resume"] == "exact"
    assert last.usage["ssmd"]["stored"] is True
    assert last.session == killed[0].session
    question = len(QUESTIONS[2].encode())  # never more tokens than bytes
    assert 1 <= fed(last) <= question + TEMPLATE_TOKENS
    assert fed(last) < last.usage["prompt_tokens"] / 2
    assert [r.text for r in killed] == [r.text for r in whole]
    for a, b in zip(killed, whole, strict=True):
        assert a.logprobs == b.logprobs  # bit for bit: floats as they came through JSON
        assert len(a.logprobs) == a.usage["completion_tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_regenerating_after_a_restart_feeds_next_to_nothing(
    model: str, artifacts: TinyArtifacts, tmp_path: Path
) -> None:
    with DaemonProcess(artifacts[model], tmp_path / "data") as daemon:
        first, second = talk(daemon, 2)
        restart(daemon)()
        messages = [SYSTEM, say(QUESTIONS[0]), say(first.text, "assistant"), say(QUESTIONS[1])]
        again = daemon.chat(messages, max_tokens=24, logprobs=True, top_logprobs=5, **SAMPLING)
        assert fed(again) <= 2
        assert (again.text, again.logprobs) == (second.text, second.logprobs)
        assert again.session == second.session
        turns = daemon.get(f"/ssmd/v1/sessions/{again.session}")[1]["turns"]
        assert len(turns) == 3  # a sibling: nothing is overwritten
        assert turns[2]["parent"] == turns[1]["parent"] == turns[0]["id"]


@pytest.mark.parametrize("model", MODELS)
def test_a_reply_cut_by_a_stop_string_continues_from_cache(
    model: str, artifacts: TinyArtifacts, tmp_path: Path
) -> None:
    with DaemonProcess(artifacts[model], tmp_path / "data") as daemon:
        whole = daemon.chat([SYSTEM, say(QUESTIONS[0])], max_tokens=24, **SAMPLING)
        stop = whole.text[len(whole.text) // 2 :][:2]
        cut = daemon.chat([SYSTEM, say(QUESTIONS[0])], max_tokens=24, stop=[stop], **SAMPLING)
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
        restart(daemon)()
        messages = [SYSTEM, say(QUESTIONS[0]), say(cut.text, "assistant"), say(QUESTIONS[1])]
        reply = daemon.chat(messages, max_tokens=8)
        assert reply.session == cut.session
        assert reply.usage["prompt_tokens_details"]["cached_tokens"] >= cut.usage["prompt_tokens"] - 2
        assert reply.usage["ssmd"]["resume"] == "exact"


def ssmd(data_dir: Path, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SSMD_DATA_DIR": str(data_dir)}
    done = commands.ssmd(*args, env=environment)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize("model", MODELS)
def test_a_session_moves_to_an_empty_data_dir(model: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    path = artifacts[model]
    with DaemonProcess(path, tmp_path / "a") as daemon:
        replies = talk(daemon, 2)
        stayed = talk(daemon, 3)[2]
    session = replies[0].session
    assert session
    ssmd(tmp_path / "a", "session", "export", session, str(tmp_path / "talk.ssmd"))
    refused = ssmd(tmp_path / "a", "session", "export", session, str(tmp_path / "talk.ssmd"), code=1)
    assert "exists" in refused.stderr
    ssmd(tmp_path / "b", "session", "import", str(tmp_path / "talk.ssmd"))
    with DaemonProcess(path, tmp_path / "b") as daemon:
        messages = [SYSTEM]
        for question, reply in zip(QUESTIONS, replies, strict=False):
            messages += [say(question), say(reply.text, "assistant")]
        moved = daemon.chat([*messages, say(QUESTIONS[2])], max_tokens=24, logprobs=True, top_logprobs=5, **SAMPLING)
        assert fed(moved) <= len(QUESTIONS[2].encode()) + TEMPLATE_TOKENS
        assert moved.usage["ssmd"]["resume"] == "exact"
        assert (moved.text, moved.logprobs) == (stayed.text, stayed.logprobs)
        other = daemon.chat([SYSTEM, say(QUESTIONS[0])], max_tokens=4)
        assert fed(other) == other.usage["prompt_tokens"]  # imported checkpoints serve the imported session only


def test_after_a_loss_the_state_is_that_of_reading_anew(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """And what follows is exact to that, whether the process was stopped meanwhile or not."""
    path = artifacts["granite-int8"]
    fields = {"max_tokens": 24, "logprobs": True, "top_logprobs": 5, **SAMPLING}
    told: list[list[Reply]] = []
    for killed in (False, True):
        with DaemonProcess(path, tmp_path / f"lost-{killed}") as daemon:
            messages = [SYSTEM]
            for question, reply in zip(QUESTIONS, talk(daemon, 2), strict=False):
                messages += [say(question), say(reply.text, "assistant")]
            ssmd(tmp_path / f"lost-{killed}", "session", "gc", "--quota", "1")
            anew = daemon.chat([*messages, say(QUESTIONS[2])], **fields)
            if killed:
                restart(daemon)()
            more = [*messages, say(QUESTIONS[2]), say(anew.text, "assistant"), say(QUESTIONS[0])]
            told.append([anew, daemon.chat(more, **fields)])
    for anew, after in told:
        assert (anew.usage["ssmd"]["resume"], fed(anew)) == ("none", anew.usage["prompt_tokens"])
        assert after.usage["ssmd"]["resume"] == "exact"
        assert [anew.logprobs, after.logprobs] == [r.logprobs for r in told[0]]


Told = tuple[tuple[str, str], ...]
EXCHANGES = 4  # more would not fit the tiny models' context


class Client(threading.Thread):
    """Goes on with one conversation until the daemon dies; `told` are the exchanges it was told are done."""

    def __init__(
        self, daemon: DaemonProcess, salt: str, session: str | None = None, told: tuple[tuple[str, str], ...] = ()
    ):
        super().__init__()
        self._daemon = daemon
        self.salt = salt
        self.session = session
        self.told = told
        self.replies: list[Reply] = []

    def again(self) -> Client:
        """The same client, reconnected; after some exchanges it starts a new conversation."""
        if len(self.told) >= EXCHANGES:
            return Client(self._daemon, f"{self.salt[0]}{int(self.salt[1:]) + 1}")
        return Client(self._daemon, self.salt, self.session, self.told)

    def run(self) -> None:
        while len(self.told) < EXCHANGES:
            question = f"{self.salt}: {QUESTIONS[len(self.told) % 3]}"
            messages = [SYSTEM]
            for asked, answered in self.told:
                messages += [say(asked), say(answered, "assistant")]
            reply = Reply()
            try:
                for _ in self._daemon.stream(reply, [*messages, say(question)], max_tokens=6, **SAMPLING):
                    pass
            except (OSError, HTTPException):  # the daemon was killed
                return
            finally:
                if reply.finish_reason is not None:
                    self.told = (*self.told, (question, reply.text))
                    self.session = reply.session
                    self.replies.append(reply)
            if reply.finish_reason is None:
                return


def assert_whole(turns: Sequence[Turn], told: Sequence[tuple[str, str]], kills: int) -> None:
    """All that the client was told of stands in one chain; each kill may have left one turn that it was not told of."""
    known = {t.id for t in turns}
    assert len(told) <= len(turns) <= len(told) + kills
    assert all(t.parent is None or t.parent in known for t in turns)
    above: set[str | None] = {None}
    for asked, answered in told:
        fitting = [t for t in turns if t.parent in above and t.messages[-1].content == asked]
        above = {t.id for t in fitting if t.answer.content == answered}
        assert above, f"{asked!r} -> {answered!r} is not stored where it belongs"


@pytest.mark.parametrize("model", ["granite-int8", pytest.param("llama-f32", marks=pytest.mark.full)])
def test_kill_at_random_instants_under_load(model: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    chance = random.Random(model)
    daemon = DaemonProcess(artifacts[model], tmp_path / "data")
    clients = [Client(daemon, f"{name}1") for name in "abc"]
    finished = 0
    for kill in range(1, KILLS + 1):
        daemon.start()
        clients = [c.again() for c in clients]
        for client in clients:
            client.start()
        time.sleep(chance.uniform(0.0, 1.0))
        daemon.kill()
        for client in clients:
            client.join()
            complete = [r for r in client.replies if r.usage]
            assert all(r.usage["ssmd"]["stored"] for r in complete)
            if client.told[: -len(client.replies) or None]:  # what came before the kill is not read again
                assert all(r.usage["prompt_tokens_details"]["cached_tokens"] > 0 for r in complete)
            finished += len(client.replies)
        store = Store.open(tmp_path / "data")  # the database is whole, and so is each session
        for client in clients:
            if client.session is not None:
                assert_whole(store.turns(client.session), client.told, kill)
        store.close()
    assert finished > KILLS, "the kills left no client the time to finish anything: nothing was tested"
