"""Edit, regenerate, choices, forks, each after a SIGKILL: nothing before it is read again, nothing is overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon_process import Reply
from forked import DaemonProcess
from whole.test_resume import QUESTIONS, SAMPLING, SYSTEM, fed, say, ssmd

# Besides the question: the answer's last token, and <|im_end|> \n <|im_start|> u s er \n … <|im_end|> \n <|im_start|>
# a s s i s t an t \n or so in the tiny vocabulary.
TEMPLATE_TOKENS = 19
FIELDS = {"max_tokens": 24, "logprobs": True, "top_logprobs": 3, **SAMPLING}


@pytest.fixture(scope="module", params=[pytest.param("llama-f32", marks=pytest.mark.full), "granite-int8"])
def talked(
    request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DaemonProcess, list[dict[str, str]], list[Reply], Path]]:
    """A daemon, the messages of three exchanges, their replies, its data directory."""
    data = tmp_path_factory.mktemp("data") / "data"
    with DaemonProcess(artifacts[request.param], data) as daemon:
        messages, replies = [SYSTEM], []
        for question in QUESTIONS:
            replies.append(daemon.chat([*messages, say(question)], **FIELDS))
            messages += [say(question), say(replies[-1].text, "assistant")]
        yield daemon, messages, replies, data


def killed(daemon: DaemonProcess) -> None:
    daemon.kill()
    daemon.start()


def turns(daemon: DaemonProcess, session: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.get(f"/ssmd/v1/sessions/{session}")[1]["turns"]
    return found


def test_an_edited_message_resumes_from_before_it(talked: Any) -> None:
    daemon, messages, replies, _ = talked
    session = replies[0].session
    before = turns(daemon, session)
    edited = "And what else is there?"
    for k in (2, 1):  # the last question, the one before it
        killed(daemon)
        history = messages[: 1 + 2 * k]
        reply = daemon.chat([*history, say(edited)], **FIELDS)
        assert reply.session == session
        assert reply.usage["ssmd"]["resume"] == "exact"
        assert fed(reply) <= len(edited.encode()) + TEMPLATE_TOKENS
        assert turns(daemon, session)[-1]["parent"] == before[k - 1]["id"]
    after = turns(daemon, session)
    assert after[: len(before)] == before
    killed(daemon)
    follow = daemon.chat([*messages, say("Go on.")], **FIELDS)  # the branch that was left
    assert (follow.session, turns(daemon, session)[-1]["parent"]) == (session, before[2]["id"])
    assert fed(follow) <= len("Go on.") + TEMPLATE_TOKENS


def test_an_edited_first_message_shares_what_stands_before_it(talked: Any) -> None:
    """No answer is echoed, so without naming it the session is another one; with its name a branch at the root."""
    daemon, _, replies, _ = talked
    killed(daemon)
    other = daemon.chat([SYSTEM, say("Something else?")], **FIELDS)
    assert other.session != replies[0].session
    named = daemon.chat([SYSTEM, say("Something else!")], session=replies[0].session, **FIELDS)
    assert named.session == replies[0].session
    assert turns(daemon, named.session)[-1]["parent"] is None


def test_regenerating_keeps_both(talked: Any) -> None:
    daemon, messages, replies, _ = talked
    session = replies[0].session
    before = turns(daemon, session)
    killed(daemon)
    again = daemon.chat(messages[:-1], **{**FIELDS, "seed": 99})
    assert fed(again) == 1
    assert again.usage["ssmd"]["resume"] == "exact"
    after = turns(daemon, session)
    assert after[:-1] == before
    assert after[-1]["parent"] == before[2]["parent"]
    assert daemon.get(f"/ssmd/v1/sessions/{session}")[1]["head"] == after[-1]["id"]
    same = daemon.chat(messages[:-1], **FIELDS)
    assert (same.text, same.logprobs) == (replies[-1].text, replies[-1].logprobs)


def test_choices_are_siblings_and_each_goes_on(talked: Any) -> None:
    daemon, _, _, _ = talked
    question = say("Give me three endings.")
    asked = daemon.chat([SYSTEM, question], n=3, **FIELDS)
    killed(daemon)
    siblings = turns(daemon, asked.session)
    assert [t["parent"] for t in siblings] == [None] * 3
    assert daemon.get(f"/ssmd/v1/sessions/{asked.session}")[1]["head"] == siblings[0]["id"]
    for sibling in siblings[::-1]:
        reply = daemon.chat([*sibling["messages"], say("And then?")], **FIELDS)
        assert reply.session == asked.session
        assert fed(reply) <= len("And then?") + TEMPLATE_TOKENS
        assert turns(daemon, asked.session)[-1]["parent"] == sibling["id"]


def test_a_fork_made_while_the_daemon_runs(talked: Any) -> None:
    daemon, messages, replies, data = talked
    session = str(replies[0].session)
    first = turns(daemon, session)[0]["id"]
    told = ssmd(data, "session", "fork", session, "--turn", first).stdout
    fork = told.split(":")[0]
    killed(daemon)
    reply = daemon.chat([*messages[:3], say("Elsewhere?")], session=fork, **FIELDS)
    assert reply.session == fork
    assert reply.usage["ssmd"]["resume"] == "exact"
    assert fed(reply) <= len("Elsewhere?") + TEMPLATE_TOKENS
    assert [t["parent"] for t in turns(daemon, fork)] == [None, first]
    ssmd(data, "session", "export", fork, str(data.parent / "fork.ssmd"))
    ssmd(data.parent / "other", "session", "import", str(data.parent / "fork.ssmd"))
    assert "2 turns" in ssmd(data.parent / "other", "session", "tree", fork).stdout
