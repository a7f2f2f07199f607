"""Reasoning and tool calls as the page shows them: folded, while they come and afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import Window
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from saying import Saying

pytestmark = pytest.mark.ui
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "<b>Paris</b>"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]


@pytest.fixture(scope="module")
def says(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


@pytest.fixture
def page(browser: Any, says: Daemon) -> Iterator[Window]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    one = Window(context, says.url)
    one.sampling(temperature=0, max_tokens=400)
    yield one
    one.check()
    context.close()


def script(one: Daemon, text: str) -> None:
    program, tokenizer = one.engine.program, one.engine._texts.tokenizer
    assert isinstance(program, Saying)
    program.say([*tokenizer.encode(text), 2])


def test_reasoning_is_folded_while_it_comes_and_afterwards(page: Window, says: Daemon) -> None:
    script(says, "<think>\nIt may rain.\n</think>\n\nTake a coat.")
    page.open()
    page.say("Do I need a coat?")
    page.answered(1)
    for _ in range(2):
        assert page.texts(".turn .said .written > p") == ["Take a coat."]
        assert page.texts(".thought summary") == ["Reasoning"]
        assert not page.page.locator(".thought").first.evaluate("one => one.open")
        page.page.reload()
        page.answered(1)
    page.say("And today?")  # goes on from the same turn
    page.answered(2)
    (session,) = says.store.sessions() if says.store is not None else []
    assert session.turns == 2


def test_calls_are_folded(page: Window, says: Daemon) -> None:
    script(says, f"I look.\n{CALL}")
    answer = says.chat("What about Paris?", tools=TOOLS, max_tokens=300, logit_bias={})
    page.open(f"#/chat/{answer.json['usage']['ssmd']['session']}")
    page.answered(1)
    assert page.texts(".said summary") == ["Calls get_weather"]
    page.page.click(".said summary")
    assert page.texts(".said details .typed") == ['{"city": "<b>Paris</b>"}']
    assert page.texts(".said .written > p") == ["I look."]
