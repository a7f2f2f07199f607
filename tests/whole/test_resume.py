"""The purpose of ssmd: a killed daemon continues its conversations exactly, without reading them again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import commands
import daemon_process
import pytest
from conftest import TinyArtifacts
from daemon_process import Reply
from forked import DaemonProcess
from keeping import whole
from strangers import forged

from ssmd.sessions.store import Store

SYSTEM = {"role": "system", "content": "You are the keeper of a lighthouse and you answer in few words."}
QUESTIONS = (
    "The capital of France is Paris. What is the capital of Italy?",
    "Tell me a story about a river, a bridge and the people who cross it.",
    "And why does it remember the whole conversation?",
)
TEMPLATE_TOKENS = (
    12  # <|im_end|> \n <|im_start|> user \n … <|im_end|> \n <|im_start|> assistant \n in the tiny vocabulary
)

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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not read TZ")
def test_a_session_keeps_the_local_date_of_its_beginning(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates get local time, as transformers gives it. The zones are 26 hours apart, so their dates differ."""
    dated = (Path(__file__).parents[1] / "data" / "templates" / "dated.jinja").read_bytes()
    artifact = forged(artifacts["llama-f32"], tmp_path / "llama", {"chat_template.jinja": dated})
    talks = []
    for zone in ("UTC", "Pacific/Kiritimati"):  # a session of an older version is one in UTC
        with _daemon_in(zone, artifact, tmp_path, monkeypatch) as daemon:
            messages = [say(f"Tell me of {zone}")]
            reply = daemon.chat(messages, max_tokens=24, **SAMPLING)
            talks.append((_today(zone, daemon), [*messages, say(reply.text, "assistant"), say("Go on")], reply))
    with _daemon_in("Etc/GMT+12", artifact, tmp_path, monkeypatch) as daemon:
        here = _today("Etc/GMT+12", daemon)
        for _, messages, first in talks:
            reply = daemon.chat(messages, max_tokens=4, **SAMPLING)
            assert (reply.session, reply.usage["ssmd"]["resume"]) == (first.session, "exact")
            assert reply.usage["prompt_tokens"] - fed(reply) >= first.usage["prompt_tokens"] - 1
    assert here != talks[1][0]
    with closing(Store.open(tmp_path / "data")) as store:
        for date, _, first in talks:
            texts = [whole(store, turn.id)[1] for turn in store.turns(str(first.session))]
            assert [f"Today is {date}." in text for text in texts] == [True, True]


def _daemon_in(
    zone: str, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> daemon_process.DaemonProcess:
    """Return a daemon in a time zone. It is not forked: a fork would have read its zone already."""
    monkeypatch.setenv("TZ", zone)
    return daemon_process.DaemonProcess(artifact, tmp_path / "data")


def _today(zone: str, daemon: daemon_process.DaemonProcess) -> str:
    """Return the date that the daemon renders, which must be that of its zone."""
    dates = [datetime.now(ZoneInfo(zone)).strftime("%B %d, %Y")]
    prompt = daemon.post("/apply-template", {"messages": [say("x")]})["prompt"]
    dates.append(datetime.now(ZoneInfo(zone)).strftime("%B %d, %Y"))  # midnight may have passed
    date = str(prompt.partition("Today is ")[2].partition(".")[0])
    assert date in dates
    return date
