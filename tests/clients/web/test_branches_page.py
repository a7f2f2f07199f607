"""Answers to earlier questions: what fails, waits or is stopped hides no turn, and loses nothing that was written."""

from __future__ import annotations

from typing import Any

import pytest
from browser import Window, slow
from daemon_process import DaemonProcess
from lanes import ENDLESS, occupy

pytestmark = pytest.mark.ui
THREE = ["One", "Two", "Three"]


def asked(window: Window) -> list[str]:
    return window.texts(".asked .typed")


def shows(window: Window, *words: str) -> None:
    window.soon(lambda: asked(window) == list(words))


def turn(window: Window, i: int) -> Any:
    return window.page.locator(".turn").nth(i)


def edit(window: Window, i: int, text: str) -> None:
    turn(window, i).get_by_label("Edit this message").click()
    window.page.get_by_label("Edit your message").fill(text)


def edited(window: Window, text: str) -> None:
    window.soon(lambda: bool(window.page.get_by_label("Edit your message").input_value() == text))


@pytest.fixture
def three(alone: Window) -> Window:
    """A window at a conversation of three turns."""
    for i, text in enumerate(THREE):
        alone.say(text)
        alone.answered(i + 1)
    return alone


def test_an_answer_that_is_refused_hides_no_turn(three: Window, own: DaemonProcess) -> None:
    first = own.get(f"/ssmd/v1/sessions/{three.session}")[1]["turns"][0]
    three.sampling(temperature=5)
    three.page.reload()
    three.answered(3)
    turn(three, 0).get_by_label("Answer again").click()
    three.page.wait_for_selector(".notice.error:has-text('temperature')")
    shows(three, *THREE)
    three.page.reload()
    three.answered(3)
    three.open(f"#/chat/{three.session}/{first['id']}")
    three.answered(3)
    assert asked(three) == THREE


def test_an_edit_that_is_not_sent_is_kept_and_hides_no_turn(three: Window, own: DaemonProcess) -> None:
    own.kill()
    three.page.wait_for_selector("text=The daemon is away")
    edit(three, 0, "Another beginning")
    three.page.get_by_label("Edit your message").press("Enter")
    three.page.wait_for_selector(".notice.error")
    edited(three, "Another beginning")
    shows(three, *THREE[1:])
    own.start()
    three.page.reload()
    edited(three, "Another beginning")
    shows(three, *THREE[1:])
    three.page.get_by_label("Edit your message").press("Enter")
    three.answered(1)
    three.page.get_by_label("Previous version").click()
    shows(three, *THREE)
    three.page.reload()
    three.answered(1)
    assert asked(three) == ["Another beginning"]


def test_an_answer_that_broke_off_among_others_is_one_of_them(three: Window, own: DaemonProcess) -> None:
    three.sampling(**ENDLESS)
    three.page.reload()
    three.answered(3)
    turn(three, 0).get_by_label("Answer again").click()
    three.page.wait_for_selector(".growing .written")
    own.kill()
    three.page.wait_for_selector(".growing", state="detached")
    three.page.wait_for_selector("text=2 / 2")
    assert "Not stored" in three.texts(".said")[0]
    three.page.get_by_label("Previous answer").click()
    shows(three, *THREE)
    own.start()
    three.page.reload()
    three.answered(3)
    three.page.get_by_label("Next answer").click()
    assert "Not stored" in three.texts(".said")[0]


def test_an_edit_stopped_in_the_queue_is_one_again(three: Window, own: DaemonProcess) -> None:
    occupy(own)
    edit(three, 1, "Another second")
    three.page.get_by_label("Edit your message").press("Enter")
    three.page.wait_for_selector(".growing .waiting")
    shows(three, "One", "Another second")
    three.page.click("button[aria-label=Stop]")
    three.page.wait_for_selector(".growing", state="detached")
    edited(three, "Another second")
    shows(three, "One", "Three")
    three.page.get_by_role("button", name="Cancel").click()
    three.page.reload()
    three.answered(3)
    assert asked(three) == THREE


def test_an_edit_half_typed_stays(three: Window) -> None:
    edit(three, 2, "Half typ")
    other = Window(three.page.context, three.url)
    other.open(f"#/chat/{three.session}")
    other.page.get_by_label("Edit your message").press("Escape")
    three.page.get_by_label("Edit your message").fill("Half typed")
    turn(other, 2).get_by_label("Answer again").click()
    other.page.wait_for_selector("text=2 / 2")
    three.page.wait_for_timeout(1500)
    edited(three, "Half typed")
    three.page.reload()
    three.page.get_by_label("Previous answer").click()
    edited(three, "Half typed")
    other.check()


def test_an_answer_is_shown_below_its_own_question_only(three: Window, own: DaemonProcess) -> None:
    edit(three, 0, "Another beginning")
    three.page.get_by_label("Edit your message").press("Enter")
    three.answered(1)
    occupy(own)
    three.say("Waits")
    three.page.wait_for_selector(".growing .waiting")
    three.page.get_by_label("Previous version").click()
    shows(three, *THREE)
    three.page.get_by_label("Next version").click()
    shows(three, "Another beginning", "Waits")
    three.page.get_by_label("Previous version").click()
    three.page.click("button[aria-label=Stop]")
    three.soon(lambda: bool(three.page.input_value("#message") == "Waits"))
    assert asked(three) == THREE
    turn(three, 2).get_by_label("Answer again").click()
    three.page.wait_for_selector(".growing .waiting")
    three.page.click("button[aria-label=Stop]")
    three.page.wait_for_selector(".growing", state="detached")
    shows(three, *THREE)


def test_a_first_answer_pulls_nobody_away(alone: Window, own: DaemonProcess) -> None:
    slow(alone, "/completions", 1500)  # as while a model is loaded
    alone.open("#/")
    alone.page.reload()
    alone.say("One")
    alone.page.get_by_role("link", name="Models").click()
    alone.page.get_by_role("link", name="Chat", exact=True).click()
    shows(alone, "One")
    alone.page.get_by_role("link", name="Models").click()
    alone.page.wait_for_timeout(2500)
    assert alone.page.url.endswith("#/models")
    alone.open("#/chat")
    alone.say("Two")
    alone.page.click("text=New chat")
    alone.page.type("#message", "Three is")
    alone.page.wait_for_timeout(2500)
    alone.page.wait_for_selector(".beside >> text=Two")
    assert alone.session == ""
    assert alone.page.input_value("#message") == "Three is"


def test_a_first_question_stopped_elsewhere_pulls_nobody_away(alone: Window, own: DaemonProcess) -> None:
    occupy(own)
    alone.say("Waits in the queue")
    alone.soon(lambda: bool(alone.session))
    alone.page.get_by_role("link", name="Now").click()
    alone.page.locator(".running").last.get_by_role("button", name="Stop").click()
    alone.soon(lambda: alone.page.locator(".running").count() == 1)
    alone.page.wait_for_timeout(500)
    assert alone.page.url.endswith("#/now")
    alone.page.click("text=New chat")
    alone.soon(lambda: bool(alone.page.input_value("#message") == "Waits in the queue"))


def test_a_question_asked_before_the_models_are_known_waits(alone: Window) -> None:
    slow(alone, "/v1/models", 1500)
    alone.open("#/")
    alone.page.reload()
    alone.say("At once")
    alone.answered(1)
