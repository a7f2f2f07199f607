"""What is typed is not lost: with a daemon that is away, stopped in the queue, in a session that is gone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Window
from conftest import TinyArtifacts
from daemon_process import DaemonProcess

pytestmark = pytest.mark.ui
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 1_000_000}
FAILED = "Failed to load resource: "
GROWS = ".growing .written"


@pytest.fixture
def own(artifacts: TinyArtifacts, tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon that may be killed, with one lane."""
    with DaemonProcess(artifacts["mamba-f32"], tmp_path / "data", "--threads", "1", "--max-running", "1") as one:
        yield one


@pytest.fixture
def alone(browser: Any, own: DaemonProcess) -> Iterator[Window]:
    context = browser.new_context()
    one = Window(context, f"http://127.0.0.1:{own.port}")
    one.allowed = [FAILED]
    one.sampling(temperature=0, max_tokens=8)
    one.open()
    yield one
    one.check()
    context.close()


def begun(one: DaemonProcess) -> http.client.HTTPResponse:
    """An answer that does not end before it is closed."""
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=30)
    body = {"model": "mamba", "messages": [{"role": "user", "content": "Takes a lane"}], "stream": True, **ENDLESS}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    return response


def in_box(window: Window, text: str) -> None:
    window.soon(lambda: bool(window.page.input_value("#message") == text))


def test_what_is_sent_while_the_daemon_is_away_is_a_draft_again(alone: Window, own: DaemonProcess) -> None:
    alone.say("One")
    alone.answered(1)
    own.kill()
    alone.page.wait_for_selector("text=The daemon is away")
    alone.say("Typed while it was away")
    alone.page.wait_for_selector(".broke")
    in_box(alone, "Typed while it was away")
    own.start()
    alone.page.reload()
    alone.answered(1)
    in_box(alone, "Typed while it was away")
    alone.page.press("#message", "Enter")
    alone.answered(2)
    alone.page.reload()
    alone.answered(2)
    assert alone.page.input_value("#message") == ""


def test_an_answer_that_broke_off_stays(alone: Window, own: DaemonProcess) -> None:
    alone.say("One")
    alone.answered(1)
    alone.sampling(**ENDLESS)
    alone.page.reload()
    alone.answered(1)
    alone.say("Will be cut")
    alone.page.wait_for_selector(GROWS)
    own.kill()
    alone.page.wait_for_selector(".broke")
    own.start()
    alone.page.reload()
    alone.page.wait_for_selector(".broke")
    assert alone.texts(".asked .typed") == ["One", "Will be cut"]
    assert alone.page.locator(GROWS).inner_text()
    alone.say("Something else")
    alone.page.wait_for_selector(GROWS)
    assert alone.texts(".asked .typed") == ["One", "Will be cut", "Something else"]
    alone.page.press("#message", "Escape")
    alone.page.wait_for_selector(".growing", state="detached")
    assert alone.texts(".asked .typed") == ["One", "Will be cut", "Something else"]


def test_a_question_stopped_in_the_queue_is_a_draft_again(alone: Window, own: DaemonProcess) -> None:
    alone.say("One")
    alone.answered(1)
    taken = [begun(own) for _ in range(2)]  # there is a spare lane
    alone.say("Waits in the queue")
    alone.page.wait_for_selector(".growing .waiting")
    alone.soon(lambda: len(own.get("/ssmd/v1/metrics")[1]["running"]) == 3)
    alone.page.click("button[aria-label=Stop]")
    alone.page.wait_for_selector(".growing", state="detached")
    in_box(alone, "Waits in the queue")
    alone.page.reload()
    in_box(alone, "Waits in the queue")
    for one in taken:
        one.close()
