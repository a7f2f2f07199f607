"""The list and the tree of sessions, what happens now, models: what each shows and does."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import LONG, Window
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
