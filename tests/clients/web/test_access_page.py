"""Keys and tickets in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import SHORT, Window
from conftest import TinyArtifacts
from daemon_process import DaemonProcess

pytestmark = pytest.mark.ui
KEY = "a-long-secret"
REFUSED = "Failed to load resource: the server responded with a status of 40"


def keyed(artifacts: TinyArtifacts, folder: Path) -> DaemonProcess:
    one = DaemonProcess(artifacts["mamba-f32"], folder / "data", "--threads", "1")
    one._environment["SSMD_API_KEY"] = KEY
    return one


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Any, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with keyed(artifacts, tmp_path) as one:
        context = browser.new_context()
        window = Window(context, f"http://127.0.0.1:{one.port}")
        window.allowed = [REFUSED]
        window.sampling(**SHORT)
        window.open()
        window.page.get_by_label("API key").fill("not-the-right-key")
        window.page.keyboard.press("Enter")
        window.page.wait_for_selector("text=That key is not known here")
        window.page.get_by_label("API key").fill("ключ-от-двери")
        window.page.keyboard.press("Enter")
        window.page.wait_for_selector("text=printable ASCII")
        window.page.get_by_label("API key").fill(KEY)
        window.page.keyboard.press("Enter")
        window.page.wait_for_selector("#message")
        window.say("With a key")
        window.answered(1)
        window.page.reload()
        window.answered(1)
        assert window.page.evaluate("JSON.stringify(localStorage)").count(KEY) == 0
        window.check()
        context.close()


def test_a_ticket_opens_the_page_once_and_leaves_the_address(
    browser: Any, artifacts: TinyArtifacts, tmp_path: Path
) -> None:
    with keyed(artifacts, tmp_path) as one:
        context = browser.new_context()
        window = Window(context, f"http://127.0.0.1:{one.port}")
        window.allowed = [REFUSED]
        window.sampling(**SHORT)
        asking = context.request.post(
            f"{window.url}/ssmd/v1/tickets", headers={"authorization": f"Bearer {KEY}"}, data={}
        )
        ticket = asking.json()["ticket"]
        window.open(f"#ticket={ticket}")
        window.page.wait_for_selector("#message")
        assert ticket not in window.page.url
        window.say("With a ticket")
        window.answered(1)
        other = Window(browser.new_context(), window.url)
        other.allowed = [REFUSED]
        other.open(f"#ticket={ticket}")
        other.page.wait_for_selector("text=This daemon asks for a key")
        assert ticket not in other.page.url
        other.page.wait_for_selector("text=The link was used already")
        other.check()
        window.check()
        context.close()


def test_an_open_page_redeems_a_ticket_and_prompts_again_later(
    browser: Any, artifacts: TinyArtifacts, tmp_path: Path
) -> None:
    with keyed(artifacts, tmp_path) as one:
        window = Window(browser.new_context(), f"http://127.0.0.1:{one.port}")
        window.allowed = ["Failed to load resource: "]
        window.open("#/models")
        window.page.wait_for_selector("text=This daemon asks for a key")
        headers = {"authorization": f"Bearer {KEY}"}
        asking = window.page.request.post(f"{window.url}/ssmd/v1/tickets", headers=headers, data={})
        window.page.goto(f"{window.url}/#ticket={asking.json()['ticket']}")  # the same document
        window.page.wait_for_selector(".models")
        assert window.page.url.endswith("#/models")
        one.kill()
        one.start()
        window.page.wait_for_selector("text=This daemon asks for a key")
        assert window.texts("#key-said") == ["The key of this tab is not known here any more."]
        window.check()
        window.page.context.close()
