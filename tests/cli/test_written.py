"""Answers with reasoning in a terminal chat: a notice instead of the reasoning, which is kept with the answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from saying import Saying

from ssmd.cli.chat import talk
from ssmd.cli.chat.talk import AnswerCollector
from ssmd.daemon.discovery import Address


@pytest.fixture(scope="module")
def says(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["granite-int8"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


def test_reasoning_is_told_of_and_what_is_said_is_shown() -> None:
    told: list[object] = []
    one = AnswerCollector(told.append, told.append)
    for thought in ("It ", "", "may rain."):
        one.think(thought)
    for said in ("", "Take ", "a coat."):
        one.say(said)
    one.pause()
    assert told == [True, False, "Take ", "a coat."]
    assert one.text == "<think>\nIt may rain.\n</think>\n\nTake a coat."


def test_reasoning_that_is_cut_is_told_of_no_longer() -> None:
    told: list[object] = []
    one = AnswerCollector(told.append, told.append)
    one.think("It ")
    one.pause()
    assert (told, one.text) == ([True, False], "<think>\nIt ")


def test_an_answer_goes_on_within_its_reasoning_and_after_it() -> None:
    told: list[object] = []
    one = AnswerCollector(told.append, told.append, begun="<think>\nIt ")
    one.think("may rain.")
    one.say("Take ")
    assert (told, one.text) == ([True, False, "Take "], "<think>\nIt may rain.\n</think>\n\nTake ")
    more = AnswerCollector(told.append, told.append, begun=one.text)
    more.say("a coat.")
    assert (told[-1], more.text) == ("a coat.", f"{one.text}a coat.")


def test_a_talk_goes_on_from_an_answer_with_reasoning(says: Daemon) -> None:
    program, tokenizer = says.engine.program, says.engine._texts.tokenizer
    assert isinstance(program, Saying)
    program.say([*tokenizer.encode("<think>\nIt may rain.\n</think>\n\nTake a coat."), 2])
    address = Address(says.url, None, pid=0, version="", started_at=0, token="none")
    shown: list[str] = []
    thinks: list[bool] = []
    one = talk.Talk(talk.Daemon(lambda: address), says.model, thinking=thinks.append)
    for n in (1, 2):
        said = one.say("Do I need a coat?", shown.append)
        assert "".join(shown) == "Take a coat." * n
        assert said.text == "<think>\nIt may rain.\n</think>\n\nTake a coat."
        assert thinks == [True, False] * n
        assert said.session is not None
        assert len(says.turns(said.session)) == n
