"""The chat in a real browser: ask, stop, again, edit, go on, forks, a reload in the middle, a daemon that is killed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import LONG, SHORT, Window, in_box
from conftest import ROOT, TinyArtifacts
from daemon_process import DaemonProcess
from strangers import forged

pytestmark = pytest.mark.ui
MODEL = "mamba-f32"
GROWS = ".growing .written"
LOST = "Failed to load resource: net::ERR"


def test_a_conversation_is_stored_and_goes_on(window: Window, served: DaemonProcess) -> None:
    window.say("Hello there")
    window.answered(1)
    window.say("And again")
    window.answered(2)
    told = served.get(f"/ssmd/v1/sessions/{window.session}")[1]
    assert [turn["messages"][-2]["content"] for turn in told["turns"]] == ["Hello there", "And again"]
    assert "from cache" in window.texts(".cost")[-1]
    window.page.reload()
    window.answered(2)
    assert window.texts(".asked .typed") == ["Hello there", "And again"]


def test_a_prompt_that_parts_from_another_says_where(window: Window, served: DaemonProcess) -> None:
    """Below the answer: as it comes, and read again from the daemon."""
    same = "The keeper of the lighthouse wrote down every ship that passed by night. " * 4
    window.say(f"{same} It is noon.")
    window.answered(1)
    window.open()
    window.say(f"{same} It is one o'clock, and the fog has lifted.")
    window.answered(1)
    found = re.search(r"differs from an earlier prompt after (\d+) tokens", window.texts(".cost")[-1])
    assert found is not None, window.texts(".cost")
    [turn] = served.get(f"/ssmd/v1/sessions/{window.session}")[1]["turns"]
    assert turn["usage"]["parted_at"] == int(found[1]) >= 64
    window.page.reload()
    window.answered(1)
    assert found[0] in window.texts(".cost")[-1]


def test_a_prompt_that_parts_shows_the_words_of_both(window: Window) -> None:
    """From the daemon, on demand: where, with which words, and a way to the earlier one while that is stored."""
    same = "The gardener counted all the pears that fell from the old tree. " * 4
    window.say(f"{same}<b>Seven</b> were ripe.")
    window.answered(1)
    earlier = window.session
    window.open()
    window.say(f"{same}<i>Nine</i> were green.")
    window.answered(1)
    later = window.session
    window.page.click("text=Show the words")
    window.page.wait_for_selector(".parting dl")
    here, there = window.texts(".parting dd")
    assert "old tree. <" in here
    assert window.texts(".parting mark")[0].startswith("i>Nine</i> were green.")
    assert window.texts(".parting mark")[1].startswith("b>Seven</b> were ripe.")
    assert here != there
    window.page.click("text=Hide the words")
    window.page.wait_for_selector(".parting", state="detached")
    window.page.click("text=Show the words")
    with window.page.expect_response(lambda response: response.url.endswith(f"/sessions/{earlier}")):
        window.page.click(".parting a")
    window.soon(lambda: window.session == earlier)
    assert window.page.request.delete(f"{window.url}/ssmd/v1/sessions/{earlier}").ok
    window.open(f"#/chat/{later}")
    window.answered(1)
    window.page.click("text=Show the words")
    window.page.wait_for_selector("text=The earlier prompt is not stored.")


def test_words_that_part_run_in_the_direction_of_their_text(window: Window) -> None:
    same = "הגנן ספר את כל האגסים שנפלו מן העץ הישן. " * 3
    for text in ("שבעה", "תשעה"):
        window.open()
        window.say(f"{same}{text}")
        window.answered(1)
    window.page.click("text=Show the words")
    window.page.wait_for_selector(".parting dl")
    directions = "[...document.querySelectorAll('.parting dd')].map((one) => getComputedStyle(one).direction)"
    assert window.page.evaluate(directions) == ["rtl", "rtl"]


def test_stop_keeps_what_was_said(window: Window, served: DaemonProcess) -> None:
    window.sampling(**LONG)
    window.open()
    window.say("Tell me a long story")
    window.page.wait_for_selector(GROWS)
    window.page.click("button[aria-label=Stop]")
    window.answered(1)
    [turn] = served.get(f"/ssmd/v1/sessions/{window.session}")[1]["turns"]
    assert not turn["complete"]
    assert "Stopped here" in window.texts(".said")[0]


def test_escape_stops(window: Window) -> None:
    window.sampling(**LONG)
    window.open()
    window.say("Tell me a long story")
    window.page.wait_for_selector(GROWS)
    window.page.press("#message", "Escape")
    window.answered(1)


def test_again_edit_and_the_switches_between(window: Window, served: DaemonProcess) -> None:
    window.sampling(temperature=1, max_tokens=24)
    window.open()
    window.say("First")
    window.answered(1)
    window.say("Second")
    window.answered(2)
    last = window.page.locator(".turn").last
    last.get_by_label("Answer again").click()
    window.soon(lambda: "2 / 2" in "".join(window.texts(".switch")))
    last.get_by_label("Edit this message").click()
    last.get_by_label("Edit your message").fill("Changed")
    last.get_by_label("Edit your message").press("Enter")
    window.soon(lambda: window.texts(".asked .typed") == ["First", "Changed"] and not window.texts(".growing"))
    turns = served.get(f"/ssmd/v1/sessions/{window.session}")[1]["turns"]
    assert len(turns) == 4
    assert len({turn["parent"] for turn in turns}) == 2
    window.page.get_by_label("Previous version of this message").click()
    assert window.texts(".asked .typed") == ["First", "Second"]
    window.page.get_by_label("Previous answer").click()
    window.say("On this branch")
    window.answered(3)
    assert window.texts(".asked .typed") == ["First", "Second", "On this branch"]
    told = served.get(f"/ssmd/v1/sessions/{window.session}")[1]["turns"]
    assert told[-1]["parent"] == turns[1]["id"]


def test_an_answer_goes_on_where_it_ended(window: Window) -> None:
    window.say("Count")
    window.answered(1)
    before = window.page.locator(".written").inner_text()
    window.page.get_by_label("Continue this answer").click()
    window.soon(lambda: "2 / 2" in "".join(window.texts(".switch")))
    after = window.page.locator(".written").inner_text()
    assert len(after) > len(before)
    assert after.startswith(before[: len(before) // 2])


def test_a_reload_in_the_middle_shows_it_whole(window: Window, served: DaemonProcess) -> None:
    window.sampling(**LONG)
    window.open()
    window.say("A story that takes a while")
    window.page.wait_for_selector(GROWS)
    window.soon(lambda: window.session != "")
    window.page.reload()
    window.page.wait_for_selector(GROWS)
    window.soon(lambda: window.page.locator(".growing .asked").count() == 1)
    assert window.texts(".growing .asked .typed") == ["A story that takes a while"]
    window.page.click("button[aria-label=Stop]")
    window.answered(1)
    [turn] = served.get(f"/ssmd/v1/sessions/{window.session}")[1]["turns"]
    shown = "".join(window.page.locator(".written").inner_text().split())
    assert shown[:40] == "".join(turn["messages"][-1]["content"].split())[: len(shown[:40])] or turn["messages"][-1]


def test_two_windows_agree(window: Window, another: Callable[[str], Window]) -> None:
    window.say("Seen by both")
    window.answered(1)
    other = another(f"#/chat/{window.session}")
    other.answered(1)
    other.say("From the other one")
    other.answered(2)
    window.answered(2)
    for each in (window, other):
        each.soon(lambda each=each: each.texts(".asked .typed") == ["Seen by both", "From the other one"])  # type: ignore[misc]


def test_enter_during_an_answer_is_said(window: Window, another: Callable[[str], Window]) -> None:
    window.sampling(**LONG)
    window.open()
    window.say("Tell me a long story")
    window.page.wait_for_selector(GROWS)
    other = another(f"#/chat/{window.session}")
    other.page.wait_for_selector(GROWS)
    for each in (other, window):
        each.say("Another question")
        each.page.wait_for_selector(".notice:has-text('An answer is under way')")
        in_box(each, "Another question")
    window.page.press("#message", "Escape")
    window.answered(1)
    assert window.texts(".asked .typed") == ["Tell me a long story"]


def test_another_client_is_seen(window: Window, served: DaemonProcess) -> None:
    window.say("By the page")
    window.answered(1)
    [turn] = served.get(f"/ssmd/v1/sessions/{window.session}")[1]["turns"]
    more = [*turn["messages"], {"role": "user", "content": "By curl"}]
    served.chat(more, session=window.session, max_tokens=8)
    window.answered(2)
    assert window.texts(".asked .typed")[-1] == "By curl"


def test_a_fork_is_a_session_of_its_own(window: Window, served: DaemonProcess) -> None:
    window.say("Root")
    window.answered(1)
    first = window.session
    window.page.get_by_label("Fork into a new session here").click()
    window.soon(lambda: window.session not in ("", first))
    window.answered(1)
    window.say("In the fork")
    window.answered(2)
    assert served.get(f"/ssmd/v1/sessions/{first}")[1]["turn_count"] == 1


def test_a_full_context_is_no_wall(browser: Any, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with DaemonProcess(artifacts["granite-f32"], tmp_path / "data", "--threads", "1") as one:
        context = browser.new_context()
        window = Window(context, f"http://127.0.0.1:{one.port}")
        window.sampling(temperature=0, max_tokens=150)
        window.open()
        for i in range(1, 9):
            window.say("How is the lake today, and how was it then? " * 2)
            window.answered(i)
            if "left out" in "".join(window.texts(".aside")):
                break
        assert i > 2
        turns = one.get(f"/ssmd/v1/sessions/{window.session}")[1]["turns"]
        assert [bool(turn["cut_messages"]) for turn in turns] == [False] * (i - 1) + [True]
        assert re.match(r"\d+ of 512 tokens of context", window.texts(".room")[0])
        window.check()
        context.close()


def test_an_answer_that_fills_the_context_is_not_continued(
    browser: Any, artifacts: TinyArtifacts, tmp_path: Path
) -> None:
    with DaemonProcess(artifacts["granite-f32"], tmp_path / "data", "--threads", "1") as one:
        context = browser.new_context()
        window = Window(context, f"http://127.0.0.1:{one.port}")
        window.sampling(**LONG)
        window.open()
        window.say("A story")
        window.answered(1)
        window.page.wait_for_selector("text=The model's context is full.")
        assert "nearly full" in window.texts(".room")[0]
        assert window.page.get_by_text("Continue").count() == 0
        assert window.page.get_by_label("Continue this answer").count() == 0
        window.say("And then?")
        window.answered(2)
        assert "The oldest 2 messages were left out: the model's context has no room for more." in window.texts(
            ".aside"
        )
        window.check()
        context.close()


def test_a_first_question_has_a_title_and_a_row_at_once(alone: Window, own: DaemonProcess) -> None:
    alone.sampling(**LONG)
    alone.open()
    alone.say("A story that takes a while")
    alone.soon(lambda: alone.session != "")
    session = alone.session
    alone.page.wait_for_selector(GROWS)
    assert alone.texts("h1") == ["A story that takes a while"]
    assert alone.texts(".beside li") == ["A story that takes a while"]
    own.kill()
    alone.page.wait_for_selector(".broke")
    own.start()
    alone.page.goto(f"{alone.url}/#/sessions")
    alone.page.reload()
    alone.page.click(".beside >> text=A story that takes a while")
    alone.page.wait_for_selector("text=Try again")
    assert alone.session == session
    assert alone.texts(".asked .typed") == ["A story that takes a while"]


RECORD = """() => {
  window.said = [];
  const look = () => document.querySelectorAll(".waiting em").forEach((one) => window.said.push(one.textContent));
  new MutationObserver(look).observe(document, {subtree: true, childList: true, characterData: true});
}"""


def test_reading_is_said(alone: Window) -> None:
    alone.page.evaluate(RECORD)
    alone.say("How is the lake? " * 3000)
    alone.answered(1, 60_000)
    said = alone.page.evaluate("said")
    assert any(re.fullmatch(r"reading [\d,]+ of [\d,]{5,}", one) for one in said), said


@pytest.fixture
def slow(artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonProcess]:
    """A daemon whose model takes three seconds to load, however quick the machine is."""
    (tmp_path / "answers.json").write_text("[]")
    monkeypatch.setenv("SCRIPTED_ANSWERS", str(tmp_path / "answers.json"))
    monkeypatch.setenv("SCRIPTED_LOAD_S", "3")
    path = (ROOT / "tests" / "data" / "scripted", ROOT / "tests", ROOT, ROOT / "runtimes", ROOT / "clients")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
    model = forged(artifacts["mamba-f32"], tmp_path / "model", {}, runtime="scripted")
    with DaemonProcess(model, tmp_path / "data", "--threads", "1") as one:
        yield one


def test_loading_is_said(browser: Any, slow: DaemonProcess) -> None:
    context = browser.new_context()
    window = Window(context, f"http://127.0.0.1:{slow.port}")
    window.sampling(temperature=0, max_tokens=8)
    window.open()
    window.page.evaluate(RECORD)
    [row] = slow.get("/ssmd/v1/metrics")[1]["models"]
    while slow.post(f"/ssmd/v1/models/{row['id']}/unload", {})["state"] != "unloaded":
        pass
    window.say("How is the lake?")
    window.answered(1, 60_000)
    said = window.page.evaluate("said")
    assert any(re.fullmatch(rf"loading {row['name']}, \d s", one) for one in said), said
    window.check()
    context.close()


DROP = """([where, files]) => {
  const carried = new DataTransfer();
  for (const [name, type, bytes, times] of files) {
    carried.items.add(new File(Array(times).fill(new Uint8Array(bytes)), name, {type}));
  }
  const kind = where === ".chat" ? new DragEvent("drop", {dataTransfer: carried, bubbles: true, cancelable: true})
    : new ClipboardEvent("paste", {clipboardData: carried, bubbles: true, cancelable: true});
  document.querySelector(where).dispatchEvent(kind);
}"""


@pytest.mark.parametrize("where", [".chat", "#message"])
def test_a_text_file_goes_into_the_message(window: Window, where: str) -> None:
    """Dropped, and pasted; a fence in it ends nothing."""
    window.page.fill("#message", "Look:")
    files = [
        ["notes.py", "", list(b"a = 1\n```\n  b = 2\n"), 1],
        ["photo.png", "image/png", [137, 80], 1],
        ["data.bin", "", [255, 254], 1],
        ["long.txt", "text/plain", [97] * 1000, 201],
    ]
    window.page.evaluate(DROP, [where, files])
    want = "Look:\n\nnotes.py\n````py\na = 1\n```\n  b = 2\n````\n\n"
    window.soon(lambda: bool(window.page.input_value("#message") == want))
    window.soon(lambda: len(window.texts(".notice span")) == 3)
    said = window.texts(".notice span")
    assert said[0].startswith("photo.png is an image")
    assert said[1].startswith("data.bin is no text")
    assert said[2] == "long.txt has 201 kB; a file of at most 200 kB goes into a message."
    window.page.press("#message", "Enter")
    window.answered(1)
    assert window.texts(".asked .typed") == ["Look:\n\nnotes.py"]
    assert window.texts(".asked .code code") == ["a = 1\n```\n  b = 2"]


# Returns whether the page took the event for itself.
TAKEN = """([where, kind, types, image]) => {
  const carried = new DataTransfer();
  for (const type of types) carried.setData(type, "1\\t2");
  if (image) carried.items.add(new File([new Uint8Array([137, 80])], "image.png", {type: "image/png"}));
  const event = kind === "paste" ? new ClipboardEvent(kind, {clipboardData: carried, bubbles: true, cancelable: true})
    : new DragEvent(kind, {dataTransfer: carried, bubbles: true, cancelable: true});
  return !document.querySelector(where).dispatchEvent(event);
}"""


def test_text_pasted_or_dropped_is_left_to_the_field(window: Window) -> None:
    """Cells of a spreadsheet are text and a picture in the clipboard; a text that is dragged is no file."""
    cells = ["text/plain", "text/html"]
    assert not window.page.evaluate(TAKEN, ["#message", "paste", cells, True])
    assert window.page.evaluate(TAKEN, ["#message", "paste", [], True]), "a picture alone"
    window.page.wait_for_selector(".notice:has-text('image.png is an image')")
    for kind in ("dragover", "drop"):
        assert not window.page.evaluate(TAKEN, ["#message", kind, ["text/plain"], False])
        assert window.page.evaluate(TAKEN, ["#message", kind, [], True]), "a file"


def test_a_number_out_of_its_range_is_said(window: Window) -> None:
    window.page.click("button[aria-label='System prompt and sampling']")
    field = window.page.get_by_label("Temperature", exact=True)
    window.soon(lambda: bool(field.get_attribute("max") == "2"))
    field.fill("9")
    window.page.wait_for_selector("text=A number from 0 to 2.")
    assert window.page.evaluate("JSON.parse(localStorage['ssmd.sampling']).temperature") is None
    field.fill("0.5")
    window.page.wait_for_selector("text=A number from 0 to 2.", state="detached")
    assert window.page.evaluate("JSON.parse(localStorage['ssmd.sampling']).temperature") == 0.5
    window.page.get_by_label("Top k").fill("1.5")
    window.page.wait_for_selector("text=A whole number of -1 or more.")


def test_system_prompt_and_sampling_are_sent(window: Window, served: DaemonProcess) -> None:
    window.page.click("button[aria-label='System prompt and sampling']")
    window.page.get_by_label("System prompt", exact=True).fill("Be brief")
    window.page.get_by_label("Longest answer").fill("3")
    window.say("Hi")
    window.answered(1)
    [turn] = served.get(f"/ssmd/v1/sessions/{window.session}")[1]["turns"]
    assert turn["messages"][0] == {"role": "system", "content": "Be brief"}
    assert turn["finish_reason"] == "length"


def test_an_empty_field_shows_the_models_default(browser: Any, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with DaemonProcess(artifacts[MODEL], tmp_path / "data", "--default", "temperature=0.3") as one:
        context = browser.new_context()
        window = Window(context, f"http://127.0.0.1:{one.port}")
        window.open()
        window.page.click("button[aria-label='System prompt and sampling']")
        window.soon(lambda: window.page.get_by_label("Temperature").get_attribute("placeholder") == "0.3")
        assert window.page.get_by_label("Temperature").input_value() == ""
        assert window.page.get_by_label("Top p").get_attribute("placeholder") == "1"
        window.check()
        context.close()


def test_drafts_stay_with_their_sessions(window: Window) -> None:
    window.say("One")
    window.answered(1)
    window.page.fill("#message", "a thought that is not sent")
    window.page.reload()
    window.answered(1)
    assert window.page.input_value("#message") == "a thought that is not sent"
    window.page.click("text=New chat")
    window.soon(lambda: window.page.input_value("#message") == "")
    window.say("A story, meanwhile one types")
    window.page.type("#message", "typed while the session got its id")
    window.answered(1)
    assert window.page.input_value("#message") == "typed while the session got its id"


def test_a_full_storage_is_said_and_no_more(window: Window) -> None:
    window.page.add_init_script(
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }"
    )
    window.open("#/")
    window.page.reload()
    window.page.fill("#message", "more than there is room for")
    window.page.wait_for_selector("text=storage is full")
    window.say("It works all the same")
    window.answered(1)


def test_the_daemon_is_killed_and_comes_back(browser: Any, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with DaemonProcess(artifacts["mamba-f32"], tmp_path / "data", "--threads", "1") as one:
        context = browser.new_context()
        window = Window(context, f"http://127.0.0.1:{one.port}")
        window.allowed = [LOST, "Failed to load resource: the server responded with a status of 404"]
        window.sampling(**LONG)
        window.open()
        window.say("Will be cut")
        window.page.wait_for_selector(GROWS)
        one.kill()
        window.page.wait_for_selector(".broke")
        window.page.wait_for_selector("text=The daemon is away")
        one.start()
        window.page.wait_for_selector("text=The daemon is away", state="detached")
        assert window.texts(".growing .asked .typed") == ["Will be cut"]
        window.page.click("text=Try again")
        window.page.wait_for_selector(".growing .written")
        window.page.press("#message", "Escape")
        window.answered(1)
        window.check()
        context.close()


def test_without_a_store_it_chats_all_the_same(browser: Any, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with DaemonProcess(artifacts["mamba-f32"], tmp_path / "data", "--threads", "1", "--no-store") as one:
        context = browser.new_context()
        window = Window(context, f"http://127.0.0.1:{one.port}")
        window.allowed = ["Failed to load resource: the server responded with a status of 404"]
        window.sampling(**SHORT)
        window.open()
        window.say("One")
        window.answered(1)
        window.say("Two")
        window.answered(2)
        assert "Not stored" in window.texts(".said")[-1]
        window.check()
        context.close()
