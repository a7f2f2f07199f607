"""Pictures of the page, from a real daemon and a real conversation, into docs/pictures/.

benchmarks/page_pictures.py [MODEL]     default: smollm2; each view light and dark, wide and narrow; the options, an
                                        answer under way and the key prompt once wide and once narrow
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import Window, chromium

OUT = Path(__file__).parent.parent / "docs" / "pictures"
SIZES = {"wide": (1000, 660), "narrow": (390, 780)}
ASKED = (
    "What is the capital of France?",
    "Write a short Python function that adds two numbers, then say in a list what it does.",
    "Thank you. Which river flows through Paris?",
)
OTHERS = ("Name three colours of the sea.", "Why do hybrids need a small cache?", "Write a haiku about the winter.")


def main() -> None:
    """Talk, branch, and photograph."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, DaemonProcess(model, Path(name) / "data") as one, chromium() as browser:
        for text in OTHERS:
            one.chat([{"role": "user", "content": text}], max_tokens=90)
        session = talk(browser, one)
        listed = one.get("/ssmd/v1/sessions")[1]["data"]
        one.post(f"/ssmd/v1/sessions/{listed[1]['id']}", {"pinned": True})
        for scheme in ("light", "dark"):
            for size in SIZES:
                photograph(browser, one, session, scheme, size)
        at_work(browser, one, "light", "wide")
        at_work(browser, one, "dark", "narrow")
    os.environ["SSMD_API_KEY"] = "a-key-for-a-picture"
    with tempfile.TemporaryDirectory() as name, DaemonProcess(model, Path(name) / "data") as one, chromium() as browser:
        for scheme, size in (("light", "wide"), ("dark", "narrow")):
            window = opened(browser, one, scheme, size)
            window.open()
            window.page.wait_for_selector("text=API key")
            taken(window, f"key-{scheme}-{size}")


def talk(browser: Any, one: DaemonProcess) -> str:
    """A conversation with a branch; the session's id."""
    window = Window(browser.new_context(), f"http://127.0.0.1:{one.port}")
    window.sampling(temperature=0, max_tokens=160)
    window.open()
    for i, text in enumerate(ASKED):
        window.say(text)
        window.answered(i + 1, 120_000)
    last = window.page.locator(".turn").last
    last.get_by_label("Edit this message").click()
    last.get_by_label("Edit your message").fill("How many people live there?")
    last.get_by_label("Edit your message").press("Enter")
    window.soon(lambda: "How many people live there?" in window.texts(".asked .typed") and not window.texts(".growing"))
    return window.session


def photograph(browser: Any, one: DaemonProcess, session: str, scheme: str, size: str) -> None:
    """All views in one colour scheme and size."""
    window = opened(browser, one, scheme, size)
    views = {"chat": f"#/chat/{session}", "sessions": "#/sessions", "tree": f"#/sessions/{session}"}
    for view, path in {**views, "now": "#/now", "models": "#/models"}.items():
        window.open(path)
        if view == "models":
            window.page.wait_for_selector(".offer", timeout=60_000)
            window.page.wait_for_selector(".runtime", timeout=60_000)
        taken(window, f"{view}-{scheme}-{size}")
    window.check()
    window.page.context.close()


def at_work(browser: Any, one: DaemonProcess, scheme: str, size: str) -> None:
    """A chat's options, and an answer under way."""
    window = opened(browser, one, scheme, size)
    window.sampling(temperature=0, max_tokens=2000)
    window.open()
    options = window.page.get_by_label("System prompt and sampling")
    options.click()
    taken(window, f"options-{scheme}-{size}")
    options.click()
    window.say("Write a long story about a lighthouse and the people who live in it.")
    window.soon(lambda: len("".join(window.texts(".growing .written"))) > 300, 60_000)
    taken(window, f"answer-{scheme}-{size}")
    window.page.press("#message", "Escape")
    window.answered(1)
    window.check()
    window.page.context.close()


def opened(browser: Any, one: DaemonProcess, scheme: str, size: str) -> Window:
    """Return a window of its own profile."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    return Window(context, f"http://127.0.0.1:{one.port}")


def taken(window: Window, name: str) -> None:
    """Take the picture once all stands still."""
    window.page.wait_for_timeout(700)
    file = OUT / f"page-{name}.png"
    window.page.screenshot(path=file)
    print(f"{file.name}  {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
