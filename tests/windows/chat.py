"""A chat with a kill in it, as its user has it: a daemon, two turns, TerminateProcess (SIGKILL), a daemon, a third.

Runs on any system, with that Python's ssmd: python chat.py RUNTIME FOLDER. What it prints of the texts and of what was
resumed is the same everywhere; scripts/wine compares it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = "smollm2"
QUESTIONS = ("Name a river in Germany.", "And one in France?", "Which of the two is longer?")
START_S = 300.0  # of a busy machine; before the first start five processes try an artifact that was not made there
END_S = 60.0
# A daemon to which Ctrl-Break, or SIGTERM, comes when there is a file: wine 8 can send none from another process.
SIGNAL = "signal"
SIGNALLED = f"""
import os, runpy, signal, threading, time
def wait():
    while not os.path.exists(os.path.join(os.environ["SSMD_DATA_DIR"], {SIGNAL!r})):
        time.sleep(0.1)
    signal.raise_signal(getattr(signal, "SIGBREAK", signal.SIGTERM))
threading.Thread(target=wait, daemon=True).start()
runpy.run_module("ssmd", run_name="__main__")
"""


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # each line is seen when it comes
    runtime, folder = sys.argv[1], Path(sys.argv[2]) / sys.argv[1]
    model = f"{MODEL}@{runtime}"
    folder.mkdir()
    os.environ.pop("SSMD_API_KEY", None)
    os.environ |= {"SSMD_DATA_DIR": str(folder / "data"), "SSMD_CACHE_DIR": str(folder / "cache")}
    shown = json.loads(ssmd("show", MODEL, "--runtime", runtime, "--json"))
    print(f"-- {MODEL} for {runtime}, build {shown['build'][:16]}")
    messages: list[dict[str, str]] = []
    with daemon(model) as (process, url):
        for question in QUESTIONS[:2]:
            ask(url, model, messages, question)
        process.kill()  # TerminateProcess: nothing is written after it
        process.wait(END_S)
        print("-- killed")
    with daemon(model) as (process, url):
        usage = ask(url, model, messages, QUESTIONS[2])
        assert usage["ssmd"]["resume"] == "exact", usage
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0, usage
        assert f"process {process.pid}" in ssmd("ps")
        ssmd("stop")
        print(f"-- stopped, exit code {process.wait(END_S)}")
    with daemon(model, "-c", SIGNALLED) as (process, url):
        (folder / "data" / SIGNAL).touch()
        print(f"-- ended by a signal, exit code {process.wait(END_S)}")
    [session] = json.loads(ssmd("session", "list", "--json"))
    print(f"-- one session of {session['turns']} turns is kept")


@contextlib.contextmanager
def daemon(model: str, *program: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A daemon, and where it answers. It is gone at the end, however that comes."""
    command = [sys.executable, *(program or ("-m", "ssmd")), "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    file = Path(os.environ["SSMD_DATA_DIR"]) / "daemon.json"
    try:
        yield process, _url(process, file)
    finally:
        with contextlib.suppress(OSError):
            process.kill()
        process.wait(END_S)


def _url(process: subprocess.Popen[bytes], file: Path) -> str:
    """Where a daemon that was just started answers, once it does."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError):  # it is not there yet, or being exchanged
            found = json.loads(file.read_text("utf-8"))
            if found["pid"] == process.pid:
                return str(found["url"])
        time.sleep(0.1)
    raise SystemExit(f"the daemon did not start: {process.poll()}")


def ask(url: str, model: str, messages: list[dict[str, str]], question: str) -> dict[str, Any]:
    """Say something in the conversation, and print the answer; its usage."""
    messages.append({"role": "user", "content": question})
    body = {"model": model, "messages": messages, "max_tokens": 48, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_S) as response:
        answer = json.load(response)
    text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    messages.append({"role": "assistant", "content": text})
    cached, kept = usage["prompt_tokens_details"]["cached_tokens"], usage["ssmd"]
    print(f"> {question}\n{text}")
    print(f"[cached_tokens {cached} of {usage['prompt_tokens']}, resume {kept['resume']}, stored {kept['stored']}]")
    return dict(usage)


def ssmd(*arguments: str) -> str:
    """Return the output of a command. Raises CalledProcessError."""
    command = [sys.executable, "-m", "ssmd", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True).stdout


if __name__ == "__main__":
    main()
