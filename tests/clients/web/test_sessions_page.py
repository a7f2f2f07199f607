"""The list and the tree of sessions, what happens now, models: what each shows and does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import talk
from browser import LONG, Window, slow
from conftest import TinyArtifacts
from daemon_process import DaemonProcess

pytestmark = pytest.mark.ui
REFUSED = "Failed to load resource: the server responded with a status of 400"
DROPPED = """([name, bytes]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], name));
  return transfer;
}"""


def row(title: str) -> str:
    return f'.session:has-text("{title}")'


def act(window: Window, title: str, what: str) -> None:
    window.page.locator(row(title)).first.get_by_role("button", name="Actions for").click()
    window.page.get_by_role("menuitem", name=what, exact=True).click()


def drop(window: Window, name: str, content: bytes) -> None:
    transfer = window.page.evaluate_handle(DROPPED, [name, list(content)])
    window.page.dispatch_event(".list", "drop", {"dataTransfer": transfer})


@pytest.fixture
def listed(window: Window, served: DaemonProcess, request: pytest.FixtureRequest) -> str:
    """A session in the list; its title."""
    title = f"About {request.node.name}"[:60]
    served.chat([{"role": "user", "content": title}], max_tokens=8)
    window.open("#/sessions")
    window.page.wait_for_selector(row(title))
    return title


def test_rename_pin_and_fork(window: Window, listed: str, served: DaemonProcess) -> None:
    act(window, listed, "Rename")
    window.page.get_by_label("Title; empty").fill("Another name <b>")
    window.page.keyboard.press("Enter")
    window.page.wait_for_selector(row("Another name <b>"))
    act(window, "Another name", "Pin")
    window.page.wait_for_selector(row("Another name") + " .pill")
    act(window, "Another name", "Fork")
    window.answered(1)
    found = [s for s in served.get("/ssmd/v1/sessions")[1]["data"] if "Another name" in s["title"]]
    assert sorted(s["pinned"] for s in found) == [False, True]


def test_search(window: Window, listed: str) -> None:
    window.page.fill("input[type=search]", "nothing-has-this-word")
    window.page.wait_for_selector("text=Nothing found")
    window.page.fill("input[type=search]", listed.split()[-1])
    window.page.wait_for_selector(row(listed))


def test_search_shows_what_was_searched_for_last(window: Window, served: DaemonProcess) -> None:
    for title in ("alphaword", "betaword"):
        served.chat([{"role": "user", "content": title}], max_tokens=4)
    slow(window, "search=alpha", 2000)
    window.open("#/sessions")
    window.page.reload()
    window.page.fill("input[type=search]", "alphaword")
    window.page.wait_for_timeout(500)
    window.page.fill("input[type=search]", "betaword")
    window.page.wait_for_selector(row("alphaword"), state="detached")
    window.page.wait_for_timeout(2500)
    assert window.page.locator(row("betaword")).count() > 0
    assert window.page.locator(row("alphaword")).count() == 0


def test_a_search_that_is_refused_shows_no_sessions(window: Window, listed: str) -> None:
    window.allowed = [REFUSED]
    window.page.fill("input[type=search]", "one two three four five six seven eight nine ten eleven")
    window.page.wait_for_selector("main .empty:has-text('at most 10 words')")
    assert window.page.locator(".session").count() == 0
    window.page.fill("input[type=search]", "x" * 300)
    window.page.wait_for_selector("text=Nothing found")


def test_more_of_the_list_stays(browser: Any, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    for i in range(65):
        talk.fill(tmp_path / "data", f"ses_{i}", 1)
    with DaemonProcess(artifacts["mamba-f32"], tmp_path / "data", "--threads", "1") as one:
        window = Window(browser.new_context(), f"http://127.0.0.1:{one.port}")
        window.open("#/sessions")
        window.page.get_by_role("button", name="Show more").click()
        rows = window.page.locator(".session")
        window.soon(lambda: rows.count() == 65)
        one.chat([{"role": "user", "content": "One more"}], max_tokens=4)
        window.soon(lambda: rows.count() == 66)
        window.page.evaluate("dispatchEvent(new Event('focus'))")
        window.page.wait_for_timeout(1500)
        assert rows.count() == 66
        window.check()
        window.page.context.close()


def test_what_is_used_before_it_is_deleted_stays(
    window: Window, another: Callable[[str], Window], listed: str, served: DaemonProcess
) -> None:
    [session] = [s["id"] for s in served.get("/ssmd/v1/sessions")[1]["data"] if s["title"] == listed]
    other = another(f"#/chat/{session}")
    other.answered(1)
    act(window, listed, "Delete")
    window.page.wait_for_selector(row(listed), state="detached")
    other.say("Still wanted")
    other.answered(2)
    window.page.wait_for_selector("text=used again")
    window.page.wait_for_selector(row(listed))
    window.page.wait_for_timeout(8500)
    assert served.get(f"/ssmd/v1/sessions/{session}")[1]["turn_count"] == 2


def test_an_export_of_what_is_gone_says_so(window: Window, listed: str, served: DaemonProcess) -> None:
    window.allowed = ["Failed to load resource: the server responded with a status of 404"]
    [session] = [s["id"] for s in served.get("/ssmd/v1/sessions")[1]["data"] if s["title"] == listed]
    window.page.wait_for_timeout(1500)  # until the list has settled
    assert window.page.request.delete(f"{window.url}/ssmd/v1/sessions/{session}").ok
    act(window, listed, "Export")
    window.page.wait_for_selector(".notice.error:has-text('session')")


def test_delete_and_undo(window: Window, listed: str, served: DaemonProcess) -> None:
    act(window, listed, "Delete")
    window.page.wait_for_selector(row(listed), state="detached")
    window.page.get_by_role("button", name="Undo", exact=True).click()
    window.page.wait_for_selector(row(listed))
    act(window, listed, "Delete")
    window.page.wait_for_selector(row(listed), state="detached")
    window.page.reload()  # what is still to be removed is removed when the window goes
    window.soon(lambda: listed not in str(served.get("/ssmd/v1/sessions")[1]))


def test_export_and_import_by_button_and_by_drop(window: Window, listed: str, tmp_path: Path) -> None:
    with window.page.expect_download() as saved:
        act(window, listed, "Export")
    file = tmp_path / "talk.ssmd"
    saved.value.save_as(file)
    window.page.set_input_files("input[type=file]", file)
    window.page.wait_for_selector("text=talk.ssmd: 1 turn")
    window.soon(lambda: window.page.locator(row(listed)).count() == 2)
    drop(window, "again.ssmd", file.read_bytes())
    window.page.wait_for_selector("text=again.ssmd: 1 turn")


def test_a_bad_file_is_refused_in_words(window: Window, listed: str) -> None:
    window.allowed = [REFUSED]
    drop(window, "photo.png", b"\x89PNG\r\n\x1a\n" + b"\0" * 100)
    window.page.wait_for_selector(".notice.error:has-text('photo.png')")


def test_a_file_that_misses_the_list_does_nothing(window: Window, listed: str) -> None:
    dropped = """([transfer, what]) => document.body.dispatchEvent(
      new DragEvent(what, {dataTransfer: transfer, bubbles: true, cancelable: true}))"""
    for what in ("dragover", "drop"):
        transfer = window.page.evaluate_handle(DROPPED, ["talk.ssmd", [1, 2, 3]])
        assert window.page.evaluate(dropped, [transfer, what]) is False, "prevented"


def test_the_tree_leads_to_its_turns(window: Window) -> None:
    for i, words in enumerate(("Stem", "Branch")):
        window.say(words)
        window.answered(i + 1)
    window.page.locator(".turn").last.get_by_label("Edit this message").click()
    window.page.get_by_label("Edit your message").fill("Other way")
    window.page.get_by_label("Edit your message").press("Enter")
    window.soon(lambda: "Other way" in window.texts(".asked .typed") and not window.texts(".growing"))
    window.open(f"#/sessions/{window.session}")
    window.soon(lambda: len(window.texts(".tree li")) == 3)
    window.page.locator(".tree a", has_text="Branch").first.click()
    window.answered(2)
    assert window.texts(".asked .typed") == ["Stem", "Branch"]


def test_now_shows_what_runs_and_what_was_not_read_again(window: Window) -> None:
    window.sampling(**LONG)
    window.open()
    window.say("Long")
    window.page.wait_for_selector(".growing .written")
    window.page.get_by_role("link", name="Now").click()
    window.page.locator(".running").get_by_role("button", name="Stop").click()
    window.page.wait_for_selector(".running", state="detached")
    window.page.wait_for_selector(".bars li")
    assert "from cache" in window.texts(".much")[0]
    assert window.page.locator(".plot[role=img]").count() == 3


def test_models_are_loaded_pinned_and_let_go(window: Window) -> None:
    window.open("#/models")
    window.page.get_by_role("button", name="Pin: once loaded").click()
    window.page.get_by_role("button", name="Unpin").click()
    window.page.get_by_role("button", name="Unload", exact=True).click()
    window.page.get_by_role("button", name="Load", exact=True).click()
    window.page.get_by_role("button", name="Unload", exact=True).wait_for(timeout=30_000)
    window.page.wait_for_selector(".runtime", timeout=40_000)
    window.page.wait_for_selector(".offer", timeout=40_000)
    offers = {text.split()[0]: text for text in window.texts(".offer")}
    assert "base: continues text" in offers["mamba-130m"]
    assert "base" not in offers["smollm2"]
    assert re.search(
        r"English; quick on any machine · about 93 MB to fetch · \d+ MB on disk · \d+ MB of memory", offers["smollm2"]
    )
    assert window.page.locator(".offer details[open]").count() == 0
