"""Typed text is not lost: with a daemon that is away, stopped in the queue, in a session that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import Window, in_box
from conftest import TinyArtifacts
from daemon_process import DaemonProcess
from lanes import ENDLESS, occupy

pytestmark = pytest.mark.ui
GROWS = ".growing .written"


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
    occupy(own)
    alone.say("Waits in the queue")
    alone.page.wait_for_selector(".growing .waiting")
    alone.soon(lambda: alone.session in [row["session"] for row in own.get("/ssmd/v1/metrics")[1]["running"]])
    alone.page.click("button[aria-label=Stop]")
    alone.page.wait_for_selector(".growing", state="detached")
    in_box(alone, "Waits in the queue")
    alone.page.reload()
    in_box(alone, "Waits in the queue")


def test_a_first_question_stopped_in_the_queue_is_a_draft_again(alone: Window, own: DaemonProcess) -> None:
    occupy(own)
    alone.say("Waits in the queue")
    alone.page.click("button[aria-label=Stop]")
    alone.page.wait_for_selector(".growing", state="detached")
    in_box(alone, "Waits in the queue")
    assert len(own.get("/ssmd/v1/metrics")[1]["running"]) == 1
    alone.page.reload()
    in_box(alone, "Waits in the queue")
    assert alone.session == ""


def test_the_first_question_of_a_chat_waits_on_through_a_reload(alone: Window, own: DaemonProcess) -> None:
    occupy(own)
    [first] = own.get("/ssmd/v1/metrics")[1]["running"]
    alone.say("Waits in the queue")
    alone.soon(lambda: bool(alone.session))
    alone.page.reload()
    alone.page.wait_for_selector(".growing")
    assert alone.texts(".asked .typed") == ["Waits in the queue"]
    assert alone.page.request.post(f"{alone.url}/ssmd/v1/requests/{first['id']}/stop").ok
    alone.answered(1)
    assert alone.texts(".asked .typed") == ["Waits in the queue"]
    assert alone.page.input_value("#message") == ""


def test_a_first_question_that_a_reload_interrupts_is_asked_once(alone: Window, own: DaemonProcess) -> None:
    """Its model loads, say: nothing tells the page of it, and the daemon answers all the same."""
    held: list[Any] = []
    alone.page.route("**/v1/chat/completions", lambda route: held.append(route.fetch()), times=1)
    alone.say("One")
    alone.soon(lambda: bool(held))
    alone.page.reload()
    alone.answered(1)
    assert alone.page.input_value("#message") == ""
    [session] = own.get("/ssmd/v1/sessions")[1]["data"]
    assert (session["id"], session["turn_count"]) == (alone.session, 1)
    alone.page.goto(alone.url)
    alone.page.reload()
    alone.say("Two")
    alone.answered(1)
    assert len(own.get("/ssmd/v1/sessions")[1]["data"]) == 2


def test_a_queued_question_stopped_after_a_reload_is_a_draft(alone: Window, own: DaemonProcess) -> None:
    occupy(own)
    for turns in (0, 1):
        alone.say("Waits in the queue")
        alone.soon(lambda: bool(alone.session))
        alone.page.reload()
        alone.page.wait_for_selector(".growing")
        assert alone.page.input_value("#message") == ""
        alone.page.click("button[aria-label=Stop]")
        alone.page.wait_for_selector(".growing", state="detached")
        in_box(alone, "Waits in the queue")
        assert bool(alone.session) == bool(turns)
        alone.page.reload()
        in_box(alone, "Waits in the queue")
        if turns:
            return
        for row in own.get("/ssmd/v1/metrics")[1]["running"]:
            assert alone.page.request.post(f"{alone.url}/ssmd/v1/requests/{row['id']}/stop").ok
        alone.page.press("#message", "Enter")
        alone.answered(1)
        occupy(own)


def test_an_answer_that_ends_before_its_follower_leaves_no_draft(alone: Window, own: DaemonProcess) -> None:
    alone.say("One")
    alone.answered(1)
    occupy(own)
    [first] = own.get("/ssmd/v1/metrics")[1]["running"]
    alone.say("Over meanwhile")
    alone.soon(lambda: len(own.get("/ssmd/v1/metrics")[1]["running"]) == 2)
    followed: list[str] = []

    def late(route: Any) -> None:
        followed.append(route.request.url)
        alone.page.request.post(f"{alone.url}/ssmd/v1/requests/{first['id']}/stop")
        alone.soon(lambda: own.get("/ssmd/v1/metrics")[1]["running"] == [])
        route.continue_()

    alone.page.route("**/stream", lambda route: late(route) if "/requests/" in route.request.url else route.continue_())
    alone.page.reload()
    alone.answered(2)
    assert followed
    alone.page.wait_for_timeout(500)
    assert alone.page.input_value("#message") == ""


def test_a_question_to_a_removed_session_is_asked_in_a_new_one(alone: Window, own: DaemonProcess) -> None:
    alone.say("One")
    alone.answered(1)
    gone = alone.session
    removed = alone.page.request.delete(f"{alone.url}/ssmd/v1/sessions/{gone}")
    assert removed.ok
    alone.say("Asked of no session")
    alone.page.wait_for_selector("text=This session is gone")
    alone.page.click("text=Ask in a new chat")
    in_box(alone, "Asked of no session")
    alone.page.press("#message", "Enter")
    alone.answered(1)
    assert alone.session not in ("", gone)


def test_a_name_given_elsewhere_is_seen_on_focus(alone: Window) -> None:
    alone.say("One")
    alone.answered(1)
    alone.page.wait_for_timeout(2000)  # until the list has settled after the answer
    path = f"{alone.url}/ssmd/v1/sessions/{alone.session}"
    assert alone.page.request.patch(path, data={"title": "Named elsewhere"}).ok
    alone.page.evaluate("dispatchEvent(new Event('focus'))")
    alone.page.wait_for_selector(".beside >> text=Named elsewhere", timeout=5000)


def test_no_offer_moves_when_a_pull_begins(browser: Any, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    one = DaemonProcess(artifacts["mamba-f32"], tmp_path / "data", "--threads", "1")
    one._environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    with one:
        window = Window(browser.new_context(), f"http://127.0.0.1:{one.port}")
        window.open("#/models")
        offer = window.page.locator(".offer button:enabled").first
        offer.wait_for(timeout=40_000)
        name = f"button[aria-label='{offer.get_attribute('aria-label')}']"
        where = window.page.evaluate("(name) => document.querySelector(name).getBoundingClientRect().top", name)
        offer.click()
        window.page.wait_for_selector(".pull")
        assert window.page.evaluate("(n) => document.querySelector(n).getBoundingClientRect().top", name) == where
        window.page.context.close()
