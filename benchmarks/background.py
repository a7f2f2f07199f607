"""SIGKILLs of `ssmd serve` while responses are under way in the background, and what became of each.

An episode is one data directory and some kills. In each life of the daemon four clients begin a response each, and one
of them follows it. After the kill each response must have one end: it is answered and stored once, or failed and not
stored. What failed is asked again. What was answered is gone on from, and all answers are compared with those of a
control daemon that is not killed: texts, and log probabilities of what went on, to the last bit.

Each daemon is a process of its own, forked from this one, which has its modules already: a start takes a tenth.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from alembic import command
from daemon_process import DaemonProcess
from talkers import Dead, ask, plain_bias

import ssmd_litert.runtime
from ssmd import app, cli, server
from ssmd.engine.request import turn_of
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store

CLIENTS = 4
MOST_TURNS = 4  # of a conversation: tiny models with attention have a context of 512
RESPONSES = "/v1/responses"
MOMENTS = {"as requests come": 0.25, "under way": 0.40, "as an answer is stored": 0.35}
ROWS = (
    *("kills", *MOMENTS, "requests that died before their answer", "responses accepted", "answered", "failed"),
    *("asked again", "stored once", "not stored", "events read before a kill, and the same after it"),
    *("went on from", "that went on exactly", "compared with the control"),
)


@dataclass
class Chat:
    """A conversation of a client. said: (question, tokens at most, answer), of each turn; answer: (text, logprobs)."""

    said: list[tuple[str, int, Any]] = field(default_factory=list)
    previous: str | None = None


@dataclass
class Begun:
    """A request for a response. id: "" if the request died. events: those that a reader got before the kill."""

    chat: Chat
    question: str
    tokens: int
    key: str
    id: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)


LOADED = (app, server, command, ssmd_litert.runtime)  # modules that a daemon imports while it starts


class ForkedDaemon(DaemonProcess):
    """A daemon whose process is forked from this one, while this one has a single thread and no open store."""

    def spawn(self) -> None:
        pid = os.fork()
        if pid:
            self.process = cast(Any, _Process(pid))
            return
        try:
            os.setsid()
            os.environ.update(self._environment)
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = list(self._command[2:])  # "ssmd", and its arguments
            cli.main()
        finally:
            os._exit(1)


class _Process:
    """A forked process, with what ServerProcess asks of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ended = pid, False

    def poll(self) -> int | None:
        self._ended = self._ended or os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return 1 if self._ended else None

    def kill(self) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, _: float | None = None) -> int:
        if not self._ended:
            os.waitpid(self.pid, 0)
        self._ended = True
        return 1

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Episode:
    """One data directory, its clients and its kills. counts, failures: its results."""

    def __init__(self, artifact: Path, model: str, seed: str, kills: int, folder: Path) -> None:
        self.artifact, self.model, self.kills, self.folder = artifact, model, kills, folder
        self.rng, self.bias = random.Random(seed), plain_bias(artifact)
        self.counts = Counter[str](dict.fromkeys(ROWS, 0))
        self.failures: list[str] = []
        self.daemon = ForkedDaemon(artifact, folder / "data", "--threads", "1")
        self.chats = [Chat() for _ in range(CLIENTS)]
        self.all: list[Chat] = [*self.chats]
        self.questions: dict[str, str] = {}  # each with the id that answered it, or ""
        self.unknown: set[str] = set()  # those whose requests died without an id, and were not sent again
        self._begun: list[Begun] = []

    def run(self) -> None:
        try:
            for _ in range(self.kills):
                self.life()
            self.daemon.start()
            self.settle()
            if damages := check(self.folder / "data").damages:
                self.failures.append(f"not sound at the end: {'; '.join(map(str, damages))}")
        finally:
            with contextlib.suppress(Exception):
                self.daemon.kill()
        self.compare()
        if "Traceback" in (log := (self.folder / "data.log").read_text()):
            self.failures.append(f"the daemon's log: {log[log.rindex('Traceback') :][:1500]}")

    def life(self) -> None:
        """Start, settle what the last kill left, begin responses, kill."""
        self.daemon.start()
        self.settle()
        moment = self.rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        self.counts.update(["kills", moment])
        for number, chat in enumerate(self.chats):
            if len(chat.said) >= MOST_TURNS:
                self.chats[number] = chat = Chat()
                self.all.append(chat)
            question = f"{self.rng.choice(['Why', 'When', 'How'])} {len(self.questions)}?"
            self.questions[question] = ""
            key = f"key-{len(self.questions)}" if self.rng.random() < 0.5 else ""
            self._begun.append(Begun(chat, question, self.rng.randrange(5, 60), key))
        threads = [threading.Thread(target=self.begin, args=(one,), daemon=True) for one in self._begun]
        threads.append(threading.Thread(target=self.read, args=(self._begun[0],), daemon=True))
        for thread in threads:
            thread.start()
        if moment == "as requests come":
            time.sleep(self.rng.uniform(0, 0.1))
        else:
            for thread in threads[:-1]:
                thread.join(60)
            time.sleep(self.rng.uniform(0, 0.4))
            if moment == "as an answer is stored":
                self._wait_for_a_write(self.rng.choice([0, 0, 0.001, 0.003]))
        self.daemon.kill()
        for thread in threads:
            thread.join(60)

    def _wait_for_a_write(self, then_s: float) -> None:
        log = self.folder / "data" / f"{FILE}-wal"
        before, until = log.stat().st_mtime_ns, time.monotonic() + 2
        while log.stat().st_mtime_ns == before and time.monotonic() < until:
            time.sleep(0.0002)
        time.sleep(then_s)

    def body(self, one: Begun, **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "input": one.question, "temperature": 0, "max_output_tokens": one.tokens}
        previous = {} if one.chat.previous is None else {"previous_response_id": one.chat.previous}
        return {**body, "logit_bias": self.bias, **previous, **fields}

    def begin(self, one: Begun) -> None:
        """Ask for a response. Note its id, unless the daemon dies before."""
        headers = {"idempotency-key": one.key} if one.key else {}
        try:
            answer = ask(self.daemon.port, "POST", RESPONSES, self.body(one, background=True), headers)
        except Dead:
            self.counts["requests that died before their answer"] += 1
            return
        if answer.status != 200:
            self.failures.append(f"{one.question!r}: {answer}")
            return
        self.counts["responses accepted"] += 1
        one.id = answer.json["id"]

    def read(self, one: Begun) -> None:
        """Follow a response, and keep its events until the daemon dies."""
        import http.client

        until = time.monotonic() + 10
        while not one.id and time.monotonic() < until:
            time.sleep(0.002)
        connection = http.client.HTTPConnection("127.0.0.1", self.daemon.port, timeout=60)
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError), contextlib.closing(connection):
            connection.request("GET", f"{RESPONSES}/{one.id}?stream=true")
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    one.events.append(json.loads(line[6:]))

    def settle(self) -> None:
        """Check the end of each response that was begun before the kill, and ask again what failed."""
        begun, self._begun = self._begun, []
        for one in begun:
            if not one.id and one.key:  # the same request: it may have been accepted
                self.again(one)
            elif not one.id:  # no client knows if it was accepted
                self.unknown.add(one.question)
                self.chats[self.chats.index(one.chat)] = chat = Chat()
                self.all.append(chat)
            elif self.is_answered(one):
                continue
            else:
                self.again(one)
        self._is_stored_once()
        for one in begun:
            if one.id and self.rng.random() < 0.5:
                self.go_on(one.chat)

    def again(self, one: Begun) -> None:
        self.counts["asked again"] += 1
        self.begin(one)
        until = time.monotonic() + 60
        while (found := self.get(one.id))["status"] in ("queued", "in_progress") and time.monotonic() < until:
            time.sleep(0.01)
        if not self.note(one, found):
            self.failures.append(f"{one.question!r}: asked again, and it is {found['status']}: {found['error']}")

    def get(self, id_: str) -> dict[str, Any]:
        answer = ask(self.daemon.port, "GET", f"{RESPONSES}/{id_}")
        found: dict[str, Any] = answer.json
        if answer.status != 200:
            self.failures.append(f"{id_} is gone: {found}")
            return {"status": "gone", "error": None}
        return found

    def note(self, one: Begun, found: dict[str, Any]) -> bool:
        """Note an answer; False if there is none."""
        if found["status"] not in ("completed", "incomplete"):
            return False
        [item] = found["output"]
        one.chat.said.append((one.question, one.tokens, (item["content"][0]["text"], None)))
        one.chat.previous = self.questions[one.question] = one.id
        return True

    def is_answered(self, one: Begun) -> bool:
        """Return True if a response has its answer, False if it failed. Its events are those that were read before."""
        found = self.get(one.id)
        events = [
            json.loads(line[6:])
            for line in ask(self.daemon.port, "GET", f"{RESPONSES}/{one.id}?stream=true").body.splitlines()
            if line.startswith(b"data: ")
        ]
        answered = self.note(one, found)
        if answered != (found["status"] != "failed") or events[-1]["response"]["status"] != found["status"]:
            self.failures.append(f"{one.question!r} is {found['status']} after the kill, and ends with {events[-1]}")
        if found["status"] == "failed" and found["error"]["code"] != "server_error":
            self.failures.append(f"{one.question!r} failed with {found['error']}")
        self.counts["answered" if answered else "failed"] += 1
        if answered:
            read = [_bare(event) for event in one.events]
            if read != [_bare(event) for event in events[: len(read)]]:
                self.failures.append(f"{one.question!r}: other events than before the kill")
            self.counts["events read before a kill, and the same after it"] += len(read)
        elif one.events and one.events[-1]["type"] in ("response.completed", "response.incomplete"):
            self.failures.append(f"{one.question!r}: its reader got its end, and it failed")
        return answered

    def _is_stored_once(self) -> None:
        """Check that each answered question is stored once, under its response's id, and no other one at all."""
        store = Store.open(self.folder / "data")
        with contextlib.closing(store):
            turns = [turn for session in store.sessions() for turn in store.turns(session.id)]
        there = Counter(turn.messages[-1].content for turn in turns)
        ids = {turn.messages[-1].content: turn.id for turn in turns}
        for question, id_ in self.questions.items():
            if question in self.unknown and there[question] <= 1:
                continue
            if there[question] != bool(id_) or (id_ and ids[question] != turn_of(id_.removeprefix("resp_"))):
                self.failures.append(f"{question!r} is stored {there[question]} times, answered by {id_!r}")
        answered = sum(map(bool, self.questions.values()))
        self.counts.update({"stored once": 0, "not stored": 0})
        self.counts["stored once"], self.counts["not stored"] = answered, len(self.questions) - answered

    def go_on(self, chat: Chat) -> None:
        """Ask a question after an answer, with log probabilities."""
        one = Begun(chat, f"And {len(self.questions)}?", 12, "")
        answer = ask(self.daemon.port, "POST", RESPONSES, self.body(one, top_logprobs=20))
        usage = answer.json["usage"]["ssmd"]
        self.counts.update({"went on from": 1, "that went on exactly": usage["resume"] == "exact"})
        if usage["resume"] == "portable":
            self.failures.append(f"{one.question!r} went on as portable")
        [item] = answer.json["output"]
        part = item["content"][0]
        chat.said.append((one.question, one.tokens, (part["text"], part["logprobs"])))
        chat.previous = self.questions[one.question] = answer.json["id"]

    def compare(self) -> None:
        """Ask a control daemon the same, and compare its answers."""
        with ForkedDaemon(self.artifact, self.folder / "control", "--threads", "1") as control:
            for chat in self.all:
                mirror = Chat()
                for question, tokens, (text, logprobs) in chat.said:
                    fields = {} if logprobs is None else {"top_logprobs": 20}
                    body = self.body(Begun(mirror, question, tokens, ""), **fields)
                    answer = ask(control.port, "POST", RESPONSES, body)
                    mirror.previous = answer.json["id"]
                    part = answer.json["output"][0]["content"][0]
                    self.counts["compared with the control"] += 1
                    if part["text"] != text or (logprobs is not None and part["logprobs"] != logprobs):
                        self.failures.append(f"{question!r}: {text!r}, the control says {part['text']!r}")


def _bare(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without what is named only to the first client, or measured in seconds."""
    bare = dict(event)
    if "response" in bare:
        dropped = ("tools", "usage", "completed_at")
        bare["response"] = {name: value for name, value in event["response"].items() if name not in dropped}
    return bare
