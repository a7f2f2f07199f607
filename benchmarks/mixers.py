"""Clients that hold conversations with several models at once, and retry as the OpenAI SDK does."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from talkers import CHAT, WORDS, Dead, Done, Told, body_of, told_by

MOST_TURNS = 6
RETRIES = 10  # of the SDK's setting max_retries
TIMEOUT_S = 180.0
WAITS = frozenset({"no_memory", "queue_full", "shutting_down"})  # codes of a 503 that says when to come back


class Broken(Exception):
    """A stream broke off after its head: the SDK leaves it to the program to ask again."""


@dataclass
class Life:
    """The state that clients share. port: the daemon's, also after its restart.

    stopping: it was stopped and is not back. over: clients end their present work.
    """

    port: int
    stopping: bool = False
    over: bool = False


class Caller:
    """A client of one address. fail: gets errors that no client should see."""

    def __init__(self, address: str, rng: random.Random, life: Life, fail: Callable[[str], None]) -> None:
        self.address, self.rng, self.life, self.fail = address, rng, life, fail
        self.counts = Counter[str]()

    @contextlib.contextmanager
    def send(
        self, method: str, path: str, body: Any, retry: int = 0, timeout_s: float = TIMEOUT_S
    ) -> Iterator[http.client.HTTPResponse]:
        """One attempt. Raises OSError or HTTPException where nothing answers."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.life.port, timeout=timeout_s, source_address=(self.address, 0)
        )
        with contextlib.closing(connection):
            headers = {"content-type": "application/json", "x-stainless-retry-count": str(retry)}
            connection.request(method, path, json.dumps(body), headers)
            yield connection.getresponse()

    def ask(self, method: str, path: str, body: Any) -> tuple[int, bytes] | None:
        """Status and body of an answer, after the SDK's retries; None after the last of them.

        Raises Broken where a stream breaks off.
        """
        for retry in range(RETRIES + 1):
            self.counts["requests"] += 1
            wait_s = min(8.0, 0.5 * 2**retry) * (1 - self.rng.random() / 4)
            began = time.monotonic()
            head = False
            try:
                with self.send(method, path, body, retry) as response:
                    head = True
                    read = response.read()
            except (OSError, http.client.HTTPException) as err:
                if isinstance(err, TimeoutError):
                    self.fail(f"{self.address}: {method} {path}: no answer in {time.monotonic() - began:.0f} s")
                self.counts["died with the daemon"] += 1
                if head and body.get("stream"):
                    raise Broken from err
            else:
                if response.status < 500:
                    self.counts[f"answered {response.status}"] += 1
                    return response.status, read
                wait_s = self._refused(path, response, read) or wait_s
            self.counts["retries"] += retry < RETRIES
            time.sleep(wait_s)
        self.fail(f"{self.address}: {method} {path} was given up after {RETRIES} retries")
        return None

    def _refused(self, path: str, response: http.client.HTTPResponse, read: bytes) -> float:
        """For how long to stay away. A failure unless it is one that clients are to expect."""
        try:
            code = json.loads(read)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            code = "?"
        self.counts[f"{response.status} {code}"] += 1
        after = response.getheader("retry-after")
        known = response.status == 503 and code in WAITS and after is not None
        if not known or (code == "shutting_down" and not self.life.stopping):
            self.fail(f"{self.address}: {path}: {response.status}, retry-after {after}: {read[:500]!r}")
        return float(after or 1)


@dataclass
class Talk:
    """A conversation as its client knows it. turns: so many it is to have."""

    number: str
    models: tuple[str, ...]
    turns: int
    messages: tuple[dict[str, str], ...] = ()

    @property
    def questions(self) -> int:
        return sum(m["role"] == "user" for m in self.messages)


class Mixer(Caller):
    """A client with conversations one after another. journal: the turns confirmed as stored, in order.

    begun: what was read of answers that it left, by question.
    """

    def __init__(self, number: int, seed: str, models: Sequence[str], life: Life, fail: Callable[[str], None]) -> None:
        super().__init__(f"127.0.0.{11 + number}", random.Random(f"{seed}:{number}"), life, fail)
        self.name, self._models = f"c{number}", models
        self.journal: list[Done] = []
        self.asked = Counter[str]()  # first attempts, by question
        self.begun: dict[str, str] = {}
        self._talks = self._questions = 0

    def run(self) -> None:
        try:
            while not self.life.over:
                self._talk()
        except BaseException as err:
            self.fail(f"client {self.name}: {type(err).__name__}: {err}")
            raise

    def _talk(self) -> None:
        """A conversation: most of its turns with one model, or with several in turn."""
        self._talks += 1
        several = self.rng.random() < 0.5
        models = tuple(self.rng.sample(list(self._models), self.rng.randint(2, len(self._models)) if several else 1))
        talk = Talk(f"{self.name}.{self._talks}", models, self.rng.randint(2, MOST_TURNS))
        if self.rng.random() < 0.4:
            talk.messages = ({"role": "system", "content": f"You are {talk.number}, {self.rng.choice(WORDS)}."},)
        while talk.questions < talk.turns and not self.life.over:
            self._turn(talk)

    def _turn(self, talk: Talk) -> None:
        self._questions += 1
        question = f"{self.name}-{self._questions} {' '.join(self.rng.choices(WORDS, k=self.rng.randint(1, 4)))}"
        messages = (*talk.messages, {"role": "user", "content": question})
        fields: dict[str, Any] = {
            "model": self.rng.choice(talk.models),
            "temperature": 0,
            "max_tokens": self.rng.randint(8, 40),
            "top_logprobs": 5,
            "stream": self.rng.random() < 0.6,
        }
        x = self.rng.random()
        if x < 0.25:
            fields["keep_alive"] = 0 if x < 0.12 else "5m"
        if fields["stream"] and self.rng.random() < 0.15:
            self._leave(question, messages, fields)
        told = None
        while told is None:
            self.asked[question] += 1
            try:
                answer = self.ask("POST", CHAT, body_of("", messages, fields))
                told = None if answer is None else self._heard(talk, fields, *answer)
                if answer is None or answer[0] != 200:
                    return
            except (Broken, Dead):
                self.counts["streams that broke off"] += 1
        self.counts["turns"] += 1
        if not told.stored:
            self.counts["told that it was not stored"] += 1  # a busy disk; its client asks something else then
            talk.turns = 0
            return
        talk.messages = (*messages, {"role": "assistant", "content": told.text})
        self.journal.append(Done("turn", talk.number, messages=messages, fields=fields, told=told))

    def _heard(self, talk: Talk, fields: dict[str, Any], status: int, read: bytes) -> Told | None:
        if status != 200:
            self.fail(f"{talk.number}: {status} {read[:500]!r}")
            return None
        try:
            return told_by(read, fields["stream"])
        except ValueError as err:  # the stream ended with an error
            if "shutting_down" not in str(err) or not self.life.stopping:
                self.fail(f"{talk.number}: {err}")
            raise Broken from err

    def _leave(self, question: str, messages: Sequence[dict[str, str]], fields: dict[str, Any]) -> None:
        """Ask, and go away while the model is loaded, or in the middle of the answer."""
        self.asked[question] += 1
        self.counts.update({"requests": 1, "streams left": 1})
        patient, wanted = self.rng.random() < 0.7, self.rng.randint(1, 6)
        read = ""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # the kill was first
            timeout_s = TIMEOUT_S if patient else self.rng.uniform(0.02, 1.0)
            with self.send("POST", CHAT, body_of("", messages, fields), timeout_s=timeout_s) as response:
                for line in response:
                    if response.status == 200 and line.startswith(b"data: {"):
                        choices = json.loads(line[6:]).get("choices") or [{}]
                        read += choices[0].get("delta", {}).get("content") or ""
                        wanted -= 1
                    if wanted < 0:
                        break
        self.begun[question] = read


class Keeper(Caller):
    """Loads, unloads and pins models without being asked to; never more than one is pinned."""

    def __init__(self, seed: str, models: Sequence[str], life: Life, fail: Callable[[str], None]) -> None:
        super().__init__("127.0.0.10", random.Random(f"{seed}:keeper"), life, fail)
        self._models = models

    def run(self, over: threading.Event, period_s: float) -> None:
        while not over.wait(self.rng.uniform(0.2, 2.0) * period_s):
            model = f"/ssmd/v1/models/{self.rng.choice(list(self._models))}"
            what = self.rng.choice(["load", "unload", "pin"])
            self.counts[{"load": "loads asked for", "unload": "unloads asked for", "pin": "pins"}[what]] += 1
            if what != "pin":
                self.ask("POST", f"{model}/{what}", {})
                continue
            self.ask("PATCH", model, {"pinned": True})
            over.wait(self.rng.uniform(0.5, 2.0) * period_s)
            self.ask("PATCH", model, {"pinned": False})
