"""The page's times in a real browser: until it can be used, from a token to its drawing, while 500 turns scroll.

benchmarks/page.py     prints the tables of docs/page.md. No model computes: a stream that is replayed takes its place.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon_process import conditions
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import talk
from browser import Window, chromium
from serving import serving

from ssmd.api.own.page import Page
from ssmd.app import create_app
from ssmd.config import Settings
from ssmd.engine.host.opening import close_host, open_host
from ssmd.server import listen

LOADS = 11
TOKENS = 400
GAP_S = 0.02
TURNS = 500
# Notes when a portion of the stream is handed to the page, and the frame after the text of the answer grew.
WATCH = """
window.tasks = []; window.got = []; window.shown = [];
new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((e) => e.duration)))
  .observe({type: "longtask"});
const decode = TextDecoderStream.prototype, readable = Object.getOwnPropertyDescriptor(decode, "readable");
Object.defineProperty(decode, "readable", {get() {
  return readable.get.call(this).pipeThrough(new TransformStream({transform(part, out) {
    if (part.includes('"content":"')) window.got.push(performance.now());
    out.enqueue(part);
  }}));
}});
new MutationObserver(() => {
  if (!document.querySelector(".growing .written")) return;
  const {port1, port2} = new MessageChannel();
  requestAnimationFrame(() => { port1.onmessage = () => window.shown.push(performance.now()); port2.postMessage(0); });
}).observe(document, {subtree: true, childList: true, characterData: true});
"""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the address of a daemon in a process of its own."""
    (folder / "data").mkdir(mode=0o700)
    talk.fill(folder / "data", "ses_long", TURNS)
    with subprocess.Popen([sys.executable, __file__, "--serve", str(folder)], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        try:
            yield f"http://127.0.0.1:{one.stdout.readline().strip()}"
        finally:
            one.terminate()


def serve(folder: Path) -> None:
    """Serve a long session until a signal comes; no model is loaded, the chat replays a stream."""
    settings = Settings(data_dir=folder / "data", models_dir=Settings().models_dir, port=0)
    host = open_host(settings, None, keep=True)
    host.ready()
    app = create_app(host, settings)
    replay = Route("/v1/chat/completions", replayed, methods=["POST"])

    async def either(scope: Any, receive: Any, send: Any) -> None:
        await (replay.app if scope["path"] == replay.path else app)(scope, receive, send)

    [at], _ = listen(settings)
    with serving(either, at=at) as one:
        print(one.port, flush=True)
        signal.sigwait({signal.SIGTERM})
    close_host(host)


async def replayed(request: Request) -> StreamingResponse:
    """Stream an answer of Markdown, a word at a time."""
    words = re.findall(r"\S+\s*", " ".join(talk.ANSWERS[:3]))  # each changes what is drawn; of a table not all do

    def event(delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return (
            b"data: "
            + json.dumps({"id": "chatcmpl-replayed", "choices": [choice]}, separators=(",", ":")).encode()
            + b"\n\n"
        )

    async def events() -> Any:
        yield event({"role": "assistant", "content": ""})
        for i in range(TOKENS):
            await asyncio.sleep(GAP_S)
            yield event({"content": words[i % len(words)]})
        yield event({}, "stop")
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def interactive_ms(browser: Any, url: str) -> list[float]:
    """From the request to a page in which one can type; each in a browser profile that has nothing of it."""
    found = []
    for _ in range(LOADS):
        context = browser.new_context()
        window = Window(context, url)
        window.open()
        marks = "performance.getEntriesByName('drawn')[0].startTime"
        found.append(float(window.page.evaluate(marks)))
        context.close()
    return found


def drawing_ms(browser: Any, url: str, path: str) -> tuple[list[float], list[float]]:
    """(from each portion of the stream to the end of the frame that shows it, long tasks meanwhile)."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    window = Window(context, url)
    window.page.add_init_script(WATCH)
    window.open(path)
    if path:
        window.answered(TURNS)
        window.page.wait_for_timeout(1000)
    window.page.evaluate("window.tasks.length = 0")
    window.say("Go on")
    window.page.wait_for_timeout(TOKENS * GAP_S * 1000 + 2500)
    got, shown = window.page.evaluate("[window.got, window.shown]")
    tasks = window.page.evaluate("window.tasks")
    context.close()
    later, ends = [], iter(sorted(shown))
    end = next(ends)
    for at in got:
        while end < at:
            end = next(ends, at)
        later.append(end - at)
    return later, tasks


def scrolling(browser: Any, url: str) -> tuple[float, list[float]]:
    """(ms until all turns are drawn, tasks over 50 ms while the whole conversation is scrolled through)."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    window = Window(context, url)
    window.page.add_init_script(WATCH)
    began = time.perf_counter()
    window.open("#/chat/ses_long")
    window.answered(TURNS)
    filled = (time.perf_counter() - began) * 1e3
    window.page.wait_for_timeout(1500)
    window.page.evaluate("window.tasks.length = 0")
    window.page.mouse.move(700, 400)
    for _ in range(400):
        window.page.mouse.wheel(0, -700)
        window.page.wait_for_timeout(16)
    top = window.page.evaluate("document.querySelector('.flow').scrollTop")
    tasks = window.page.evaluate("window.tasks")
    context.close()
    print(f"(scrolled up to {top:.0f} px from the top)", file=sys.stderr)
    return filled, tasks


def sizes() -> None:
    page, found = Page.read(), dict.fromkeys(("Preact and htm", "the page's own modules", "style, icon, index"), 0)
    for path, nbytes in page.sizes.items():
        vendored, module = "/vendor/" in path, path.endswith(".js")
        found[[*found][0 if vendored else 1 if module else 2]] += nbytes
    print("\n| files | bytes |\n| --- | ---: |")
    for name, nbytes in found.items():
        print(f"| {name} | {nbytes:,} |")
    print(f"| all, as it is sent (nothing is compressed) | {sum(found.values()):,} |")


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * q))]


def main() -> None:
    with tempfile.TemporaryDirectory() as name, served(Path(name)) as url, chromium() as browser:
        print(f"{conditions()}, Chromium {browser.version}\n")
        loads = interactive_ms(browser, url)
        short, _ = drawing_ms(browser, url, "")
        long, tasks = drawing_ms(browser, url, "#/chat/ses_long")
        filled, scrolled = scrolling(browser, url)
    print("| what | median | p95 | worst |\n| --- | ---: | ---: | ---: |")
    rows = (
        (f"from the request to a page one can type in, ms ({LOADS} empty profiles)", loads),
        (f"from a token received to drawn, ms ({len(short)} tokens)", short),
        (f"the same below {TURNS} turns, ms ({len(long)} tokens)", long),
    )
    for what, values in rows:
        print(f"| {what} | {statistics.median(values):.1f} | {quantile(values, 0.95):.1f} | {max(values):.1f} |")
    print(
        f"\nA session of {TURNS} turns: all drawn after {filled:.0f} ms; tasks over 50 ms while it is scrolled through:"
    )
    print(
        f"{len(scrolled)}{f', the longest {max(scrolled):.0f} ms' if scrolled else ''}; while it streams: {len(tasks)}."
    )
    sizes()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        serve(Path(sys.argv[2]))
    else:
        main()
