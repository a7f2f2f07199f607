"""A real Chromium without a screen; its windows note what must not happen: errors, violations, other hosts."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run
from typing import Any
from urllib.parse import urlsplit

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
AXE = "axe-core@4.14.1"
AXE_SHA256 = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 40_000}  # to be stopped: 4,000 tokens take 1.4 s
_NOTING = """
window.violations = [];
addEventListener("securitypolicyviolation", (e) => window.violations.push(`${e.violatedDirective} ${e.blockedURI}`));
"""


def program() -> str | None:
    """Where Chromium is."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser that runs until this is left."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Window:
    """A window at a daemon's page. allowed: beginnings of console errors that a test causes on purpose."""

    def __init__(self, context: Any, url: str) -> None:
        self.page: Any = context.new_page()
        self.url = url
        self.allowed: list[str] = []
        self._errors: list[str] = []
        self._hosts: set[str] = set()
        self.page.add_init_script(_NOTING)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda e: self._errors.append(f"uncaught: {e}"))
        self.page.on("request", lambda r: self._hosts.add(urlsplit(r.url).netloc))

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self._errors.append(f"{message.text} {message.location['url']}")

    def sampling(self, **fields: Any) -> None:
        """Set the sampling options from the next page load on, as a user sets them."""
        raw = repr(json.dumps(fields))
        self.page.add_init_script(f'localStorage["ssmd.sampling"] = {raw}')

    def open(self, path: str = "") -> None:
        self.page.goto(f"{self.url}/{path}")
        self.page.wait_for_selector("main")

    def say(self, text: str) -> None:
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    def answered(self, turns: int, within_ms: int = 30_000) -> None:
        """Wait until so many turns are there and none is under way."""
        there, under_way = self.page.locator(".turn:not(.growing)"), self.page.locator(".growing")
        self.soon(lambda: there.count() == turns and under_way.count() == 0, within_ms)

    def soon(self, condition: Callable[[], bool], within_ms: int = 15_000) -> None:
        for _ in range(within_ms // 50):
            if condition():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not happen")

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.page.locator(selector).all_inner_texts()
        return found

    @property
    def session(self) -> str:
        """The id in the address."""
        return str(self.page.url.partition("#/chat/")[2].partition("/")[0])

    def check(self) -> None:
        """Raise AssertionError if anything happened that must not."""
        errors = [e for e in self._errors if not any(e.startswith(one) for one in self.allowed)]
        # An answer may be over when the page begins to follow it.
        errors = [
            e for e in errors if not ("status of 404" in e and "/ssmd/v1/requests/" in e and e.endswith("/stream"))
        ]
        assert errors == [], errors
        assert self.page.evaluate("window.violations") == []
        assert self._hosts - {urlsplit(self.url).netloc, ""} == set()


def in_box(window: Window, text: str) -> None:
    """Wait until this is what stands where one writes."""
    window.soon(lambda: bool(window.page.input_value("#message") == text))


def slow(window: Window, part: str, ms: int) -> None:
    """Delay answers to requests with this in their address, from the next page load on."""
    window.page.add_init_script(
        f"""const at_once = window.fetch;
        window.fetch = async (...asked) => {{
          const answer = await at_once(...asked);
          if (String(asked[0]).includes({part!r})) await new Promise((go) => setTimeout(go, {ms}));
          return answer;
        }};"""
    )


def axe(cache: Path) -> str:
    """The source of axe-core."""
    return npm_file(cache, AXE, AXE_SHA256, "axe.min.js")


def npm_file(cache: Path, package: str, sha256: str, name: str) -> str:
    """A package's file: from the npm registry the first time, by the package's hash."""
    import hashlib
    import tarfile

    kept = cache / name
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            run(["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True)
            [packed] = Path(folder).glob("*.tgz")
            assert hashlib.sha256(packed.read_bytes()).hexdigest() == sha256
            with tarfile.open(packed) as opened:
                member = opened.extractfile(f"package/{name}")
                assert member is not None
                kept.write_bytes(member.read())
    return kept.read_text("utf-8")
