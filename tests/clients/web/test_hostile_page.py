"""Hostile titles and answers are text; 500 turns are there and scroll; axe-core, the keyboard, a phone's width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import talk
from browser import SHORT, Window, axe
from conftest import ROOT, TinyArtifacts
from daemon_process import DaemonProcess

pytestmark = pytest.mark.ui
HOSTILE = {
    "script": "<script>window.hacked = 1</script>",
    "markup": "<img src=x onerror='window.hacked = 1'><svg onload='window.hacked = 1'>",
    "links": "[a](javascript:window.hacked=1) [b](data:text/html,<b>) ![c](https://evil.example/x.png) javascript:1",
    "escapes": "\x1b[31mred\x1b]0;title\x07 \x00 \u202egnp.exe",
    "fence": "```html\n<iframe src='https://evil.example'></iframe>\n<style>*{display:none}</style>",
    "nested": "*" * 5000 + "`" * 5001 + "[" * 5000 + "> " * 3000 + "\n" + "- " * 3000,
}
FOCUSED = "(document.activeElement.ariaLabel || document.activeElement.innerText || document.activeElement.id).trim()"


@pytest.fixture(scope="module")
def filled(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that keeps a session of 500 turns."""
    data_dir = tmp_path_factory.mktemp("filled") / "data"
    data_dir.mkdir(mode=0o700)
    talk.fill(data_dir, "ses_long", 500)
    talk.fill(data_dir, "ses_word", 1, ["x" * 1_000_000])
    with DaemonProcess(artifacts["mamba-f32"], data_dir, "--threads", "1") as one:
        yield one


@pytest.fixture
def view(browser: Any, filled: DaemonProcess) -> Iterator[Window]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    one = Window(context, f"http://127.0.0.1:{filled.port}")
    one.sampling(**SHORT)
    yield one
    one.check()
    context.close()


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_text_is_text(view: Window, filled: DaemonProcess, what: str) -> None:
    """As a title, as a question, and as an answer."""
    text = HOSTILE[what]
    messages = [{"role": "user", "content": text[:1000]}, {"role": "assistant", "content": text}]
    reply = filled.chat([*messages, {"role": "user", "content": "and?"}], max_tokens=4)
    view.open(f"#/chat/{reply.session}")
    view.answered(1)
    shown = view.page.locator(".inner").inner_text()
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    for path in (f"#/chat/{reply.session}", "#/sessions", f"#/sessions/{reply.session}", "#/now"):
        view.open(path)
        view.page.wait_for_timeout(200)
        assert view.page.evaluate("window.hacked") is None
        assert view.page.locator("main :is(script, iframe, img, style)").count() == 0
        assert view.page.locator("main a:is([href^=javascript], [href^=data])").count() == 0
        assert view.page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_a_word_of_a_megabyte_is_shown_in_part_then_whole(view: Window) -> None:
    view.open("#/chat/ses_word")
    view.answered(1)
    assert len(view.texts(".said .written")[0]) < 30_000
    view.page.locator("text=Show all 1,000,0").click()
    view.soon(lambda: len(view.texts(".said .written")[0]) >= 1_000_000)
    assert view.page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_five_hundred_turns_are_all_there_and_scroll(view: Window) -> None:
    view.page.add_init_script(
        "window.tasks = []; new PerformanceObserver((l) => window.tasks.push(...l.getEntries().map((e) => e.duration)))"
        ".observe({type: 'longtask'})"
    )
    view.open("#/chat/ses_long")
    view.answered(500)
    assert "Question 499" in view.texts(".asked .typed")[-1]
    view.page.wait_for_timeout(500)
    view.page.evaluate("window.tasks.length = 0")
    view.page.mouse.move(700, 400)
    for _ in range(60):
        view.page.mouse.wheel(0, -900)
        view.page.wait_for_timeout(16)
    assert view.page.evaluate("document.querySelector('.flow').scrollTop") > 1000
    assert view.page.evaluate("window.tasks.filter((ms) => ms > 200)") == []  # benchmarks/page.py has the numbers


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_axe_finds_nothing_serious(browser: Any, filled: DaemonProcess, scheme: str, width: int) -> None:
    source = axe(ROOT / ".cache" / "axe")
    context = browser.new_context(viewport={"width": width, "height": 780}, color_scheme=scheme, bypass_csp=True)
    window = Window(context, f"http://127.0.0.1:{filled.port}")
    window.sampling(**SHORT)
    window.open()
    window.say("Something to look at")
    window.answered(1)
    session = window.session
    window.page.click("button[aria-label='System prompt and sampling']")
    for path in ("", f"#/chat/{session}", "#/sessions", f"#/sessions/{session}", "#/now", "#/models"):
        if path:
            window.open(path)
        window.page.wait_for_timeout(600)
        assert window.page.evaluate("document.documentElement.scrollWidth") <= width, path
        window.page.evaluate(source)
        found = window.page.evaluate("axe.run().then((r) => r.violations)")
        bad = [
            (v["id"], [n["html"][:200] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")
        ]
        assert bad == [], path
    context.close()


def test_everything_is_reached_by_keyboard(view: Window) -> None:
    view.open()
    view.page.locator("body").evaluate("document.activeElement.blur()")
    seen: list[str] = []
    while "message" not in seen and len(seen) < 120:  # the sessions of other tests stand before it
        view.page.keyboard.press("Tab")
        seen.append(view.page.evaluate(FOCUSED))
    for name in (
        "Skip to the content",
        "Sessions",
        "Now",
        "Models",
        "New chat",
        "System prompt and sampling",
        "message",
    ):
        assert name in seen, seen


# Short text that would be drawn many times larger: rows under a short head, and cells missing from each row.
TABLES = {
    "a delimiter row of one": "|" * 1000 + "\n|-|\n" + "|\n" * 1000,
    "rows without cells": "|a" * 1000 + "\n" + "|-" * 1000 + "\n" + "|\n" * 1000,
    "lists in lists": "- " * 3000 + "\n" + "> - " * 3000 + "\n" + ("- - - - - - a\n" * 1000),
}
NODES = "document.querySelector('.inner').querySelectorAll('*').length"


@pytest.mark.parametrize("what", TABLES)
def test_no_text_is_drawn_as_more_than_its_size(view: Window, filled: DaemonProcess, what: str) -> None:
    text = TABLES[what]
    messages = [{"role": "user", "content": "a table"}, {"role": "assistant", "content": text}]
    reply = filled.chat([*messages, {"role": "user", "content": "and?"}], max_tokens=4)
    view.open(f"#/chat/{reply.session}")
    view.answered(1)
    assert view.page.evaluate(NODES) < len(text) + 1000
