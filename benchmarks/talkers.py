"""Clients of a daemon that may be killed at any moment, which remember its answers."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

CHAT, SESSIONS = "/v1/chat/completions", "/ssmd/v1/sessions"
WORDS = [
    "river",
    "bridge",
    "keeper",
    "morning",
    "lighthouse",
    "boats",
    "Paris",
    "Rome",
    "why",
    "42",
    "again",
    "tomorrow",
    "Köln",
]
SHARED = "You keep a lighthouse and answer in few words."
MOST_QUESTIONS = 7  # the tiny models that have attention have a context of 512
NO_HASH = b"0" * 64


class Dead(Exception):
    """The daemon went away before the answer was whole."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    replayed: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int, method: str, path: str, body: dict[str, Any] | bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """Send a request, and return its answer. Raises Dead unless the answer came to its end."""
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        try:
            connection.request(method, path, raw, {"content-type": kind, **(headers or {})})
            response = connection.getresponse()
            read = response.read()
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as err:
            raise Dead from err
    return Answer(response.status, read, response.getheader("Idempotent-Replayed") == "true")


@dataclass(frozen=True)
class Told:
    """An answer as a client got it. tokens: (token, log probability, the 20 first) of each."""

    text: str
    tokens: list[Any]
    finish: str
    session: str
    cached: int
    prompt: int
    resume: str
    stored: bool
    state_stored: bool = True


def told_by(body: bytes, streamed: bool) -> Told:
    """Read an answer's body. Raises Dead if a stream broke off, ValueError if it reports an error."""
    if streamed:
        events = [e.removeprefix(b"data: ") for e in body.split(b"\n\n") if e]
        if not events or events[-1] != b"[DONE]":
            raise Dead
        chunks = [json.loads(e) for e in events[:-1]]
        if wrong := [c for c in chunks if "error" in c]:
            raise ValueError(f"the stream ended with {wrong[0]}")
        choices = [c for chunk in chunks for c in chunk["choices"]]
        text = "".join(c["delta"].get("content") or "" for c in choices)
        tokens = [t for c in choices if c.get("logprobs") for t in c["logprobs"]["content"]]
        finish = next(c["finish_reason"] for c in choices if c["finish_reason"])
        usage = next(c["usage"] for c in chunks if c.get("usage"))
    else:
        whole = json.loads(body)
        [choice], usage = whole["choices"], whole["usage"]
        text, tokens = choice["message"]["content"] or "", (choice["logprobs"] or {"content": []})["content"]
        finish = choice["finish_reason"]
    own = usage["ssmd"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    prompt, stored = usage["prompt_tokens"], (own["stored"], own.get("state_stored", True))
    return Told(text, tokens, finish, own["session"], cached, prompt, own["resume"], *stored)


@dataclass
class Talk:
    """A conversation as a client knows it.

    session: of the daemon that may die. head: down to the turn written last. imported: it goes on by its id alone.
    lost: a turn of it was not stored, and the client was told so. own: fields of all its requests.
    """

    number: str
    session: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    head: list[dict[str, Any]] = field(default_factory=list)
    imported: bool = False
    lost: bool = False
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def stores(self) -> bool:
        return bool(self.own.get("store", True))

    @property
    def questions(self) -> int:
        return sum(m["role"] == "user" for m in self.messages)


@dataclass(frozen=True)
class Done:
    """A client's confirmed action. attempts: all but the last one failed with a killed daemon."""

    what: str  # "turn", "fork", "delete"
    talk: str
    source: str = ""  # the talk that a fork begins with
    messages: tuple[dict[str, Any], ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    by_id: bool = False
    named: bool = False
    attempts: int = 1
    told: Told | None = None

    @property
    def question(self) -> str:
        """The question: no two turns have the same one, except those that answer it again."""
        return str(self.messages[-1]["content"]) if self.messages else ""

    @property
    def stores(self) -> bool:
        return bool(self.fields.get("store", True))


class Line:
    """The connection to the daemon. port: the running daemon's; threads wait for the next one. bias: of all answers."""

    def __init__(self, model: str, bias: dict[str, float]) -> None:
        self.model, self.bias = model, bias
        self.port = 0
        self.over = False
        self.moment = Counter[str]()  # how often something was answered: what a kill can follow at once
        self._changed = threading.Condition()
        self._life = 0

    def up(self, port: int) -> None:
        with self._changed:
            self.port, self._life = port, self._life + 1
            self._changed.notify_all()

    def down(self) -> None:
        with self._changed:
            self.port = 0

    def wait(self) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: self.port, 120):
                raise TimeoutError("no daemon came up for two minutes")
            return self.port

    def answered(self) -> None:
        with self._changed:
            self.moment["answers"] += 1
            self._changed.notify_all()

    def wait_for_answers(self, count: int, within_s: float) -> None:
        with self._changed:
            last = self.moment["answers"] + count
            self._changed.wait_for(lambda: self.moment["answers"] >= last, within_s)


class Talker:
    """A client. journal: its confirmed actions. problems: errors that no client should see."""

    most_questions = MOST_QUESTIONS

    def __init__(self, name: str, rng: random.Random, line: Line, fail: Callable[[str], None]) -> None:
        self.name, self.rng, self.line, self.fail = name, rng, line, fail
        self.journal: list[Done] = []
        self.counts = Counter[str]()
        self.talks: list[Talk] = []
        self.gone, self.doomed = set[str](), set[str]()  # sessions that were removed, and are to be
        self._asked = self._talks = 0
        self._files: list[tuple[Talk, bytes]] = []

    def run(self) -> None:
        try:
            while not self.line.over:
                self.step()
        except BaseException as err:
            self.fail(f"client {self.name}: {type(err).__name__}: {err}")
            raise

    def again(self, attempt: Callable[[int], Answer]) -> tuple[Answer, int]:
        """Try until the daemon lives long enough to answer. (answer, attempts)"""
        attempts = 0
        while True:
            port = self.line.wait()
            try:
                attempts += 1
                answer = attempt(port)
                if answer.status != 503:
                    self.line.answered()
                    return answer, attempts
            except Dead:
                self.counts["requests that died"] += 1
                while self.line.port == port and not self.line.over:
                    try:  # perhaps it was not killed
                        ask(port, "GET", "/health")
                        break
                    except Dead:
                        threading.Event().wait(0.01)

    def step(self) -> None:
        x = self.rng.random()
        whole = [t for t in self.talks if t.session and not t.lost]
        if not whole or x < 0.10:
            self._open()
            self.turn(self.talks[-1])
            return
        talk = self.rng.choice(whole[-3:])
        if x < 0.74:
            self.turn(talk)
        elif x < 0.80:
            self.edit(talk)
        elif x < 0.85:
            self.turn(talk, anew=True)
        elif x < 0.90:
            self.fork(talk)
        elif x < 0.93:
            self.export(talk)
        elif x < 0.95 and self._files:
            self.take_in(*self.rng.choice(self._files))
        elif x < 0.965 and len(whole) > 3:
            self.delete(talk)
        else:
            self.look(talk)

    def _open(self) -> None:
        self._talks += 1
        talk = Talk(f"{self.name}.{self._talks}")
        x = self.rng.random()
        if x < 0.8:
            own = SHARED if x < 0.3 else f"You are {talk.number}, {' '.join(self.rng.choices(WORDS, k=3))}."
            talk.messages.append({"role": "system", "content": own})
        self.talks.append(talk)

    def _question(self) -> dict[str, str]:
        self._asked += 1
        words = " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, 3)))
        return {"role": "user", "content": f"{self.name}-{self._asked} {words}"}

    def turn(self, talk: Talk, anew: bool = False) -> None:
        if anew and talk.messages[-1]["role"] == "assistant":
            messages = talk.messages[:-1]
        elif talk.questions >= self.most_questions:
            self.edit(talk)
            return
        else:
            messages = [*talk.messages, self._question()]
        by_id = bool(talk.session) and (talk.imported or self.rng.random() < 0.5)
        named, streamed = self.rng.random() < 0.6, self.rng.random() < 0.5
        sampled = {"temperature": self.rng.choice([0, 1.0, 1.0]), "seed": self.rng.randrange(1 << 30)}
        fields = {**sampled, "max_tokens": self.rng.randint(1, 7), "logit_bias": self.line.bias, "stream": streamed}
        fields |= talk.own
        headers = {"Idempotency-Key": f"{talk.number}-{self.rng.getrandbits(64):x}"} if named else {}
        heard: list[Told] = []

        def attempt(port: int) -> Answer:
            body = {**body_of(self.line.model, messages, fields), **({"session": talk.session} if by_id else {})}
            answer = ask(port, "POST", CHAT, body, headers)
            if answer.status == 200:
                heard[:] = [told_by(answer.body, streamed)]
            return answer

        answer, attempts = self.again(attempt)
        if answer.status != 200:
            self.fail(f"turn of {talk.number} (named {named}, by id {by_id}): {answer.status} {answer.body!r}")
            talk.lost = True
            return
        told = heard[0]
        self.counts["turns"] += 1
        self.counts["answers given again"] += answer.replayed
        if answer.replayed and not named:
            self.fail(f"an answer to {talk.number} is called a repetition, and the request had no name")
        if told.stored != talk.stores:
            self.counts["told that it was not stored"] += 1
            talk.lost = True
            return
        if by_id and told.session != talk.session:
            self.fail(f"{talk.number} was asked in session {talk.session} and answered in {told.session}")
        talk.messages = talk.head = [*messages, {"role": "assistant", "content": told.text}]
        talk.session = told.session if talk.stores else ""
        self.journal.append(
            Done("turn", talk.number, "", tuple(messages), fields, by_id, named, attempts, told)
        )  # fmt: skip

    def edit(self, talk: Talk) -> None:
        """Go back some turns, and on from there."""
        ends = [i for i, m in enumerate(talk.messages) if m["role"] == "assistant"]
        talk.messages = talk.messages[: self.rng.choice(ends[:-1]) + 1] if len(ends) > 1 else talk.messages
        if talk.questions < self.most_questions:
            self.turn(talk)

    def fork(self, talk: Talk) -> None:
        answer, attempts = self.again(lambda port: ask(port, "POST", f"{SESSIONS}/{talk.session}/fork", {}))
        if answer.status != 201:
            self.fail(f"fork of {talk.number}: {answer.status} {answer.body!r}")
            return
        self._talks += 1
        fork = Talk(f"{self.name}.{self._talks}", answer.json["id"], talk.head, talk.head, own=talk.own)
        self.talks.append(fork)
        self.journal.append(Done("fork", fork.number, talk.number, attempts=attempts))
        self.counts["forks"] += 1

    def export(self, talk: Talk) -> None:
        answer, _ = self.again(lambda port: ask(port, "GET", f"{SESSIONS}/{talk.session}/export"))
        if answer.status != 200 or not is_whole(answer.body):
            self.fail(f"export of {talk.number}: {answer.status}, {len(answer.body)} bytes, not a whole file")
            return
        self.counts["exports"] += 1
        self._files = [*self._files[-1:], (replace(talk), answer.body)]

    def take_in(self, was: Talk, file: bytes) -> None:
        """Import what was exported, go on from it, and remove it."""
        answer, _ = self.again(lambda port: ask(port, "POST", f"{SESSIONS}/import", file))
        if answer.status != 201:
            self.fail(f"import of {was.number}: {answer.status} {answer.body!r}")
            return
        self.counts["imports"] += 1
        number = f"{was.number} imported"
        talk = Talk(number, answer.json["id"], was.messages, was.messages, imported=True, own=was.own)
        self._look(talk)
        if was.session in {t.session for t in self.talks} and was.questions < self.most_questions:
            self.turn(talk)
        self._remove(talk)

    def delete(self, talk: Talk) -> None:
        self._remove(talk)
        self.talks = [t for t in self.talks if t.session != talk.session]
        self.journal.append(Done("delete", talk.number))
        self.counts["sessions removed"] += 1

    def _remove(self, talk: Talk) -> None:
        self.doomed.add(talk.session)
        answer, attempts = self.again(lambda port: ask(port, "DELETE", f"{SESSIONS}/{talk.session}"))
        if answer.status != 200 and not (answer.status == 404 and attempts > 1):
            self.fail(f"removal of {talk.number}: {answer.status} {answer.body!r}")
        self.gone.add(talk.session)

    def look(self, talk: Talk) -> None:
        self.counts["looks at a session"] += 1
        self._look(talk)

    def _look(self, talk: Talk) -> None:
        """Check that all confirmed turns of this conversation are stored."""
        answer, _ = self.again(lambda port: ask(port, "GET", f"{SESSIONS}/{talk.session}"))
        if answer.status != 200 or not is_in(talk.messages, answer.json["turns"]):
            self.fail(f"{talk.number} ({talk.session}) does not have what its client was told: {answer.body!r}")


def plain_bias(artifact: Path) -> dict[str, float]:
    """Forbid what ends an answer, and all tokens but ASCII: of a text that is not that of its tokens the state is made
    anew when a daemon is idle, and no two are at the same moment.
    """
    vocabulary = json.loads((artifact / "tokenizer.json").read_text())["model"]["vocab"]
    ascii_bytes = {*range(33, 127), *range(0x100, 0x122)}  # in the alphabet of byte-level BPE
    return {str(n): -100.0 for token, n in vocabulary.items() if not ascii_bytes.issuperset(map(ord, token)) or n < 3}


def body_of(model: str, messages: Sequence[dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    return {"model": model, "messages": list(messages), "logprobs": True, "top_logprobs": 20, **fields, **usage}


def is_whole(file: bytes) -> bool:
    """Return True if a session file has the hash that it states."""
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    said = header["__metadata__"]["sha256"]
    return bool(hashlib.sha256(file.replace(said.encode(), NO_HASH, 1)).hexdigest() == said)


def text_of(message: dict[str, Any]) -> str:
    """Return a message's text: its parts joined."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def is_in(messages: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]]) -> bool:
    """Return True if a path of a session's tree is this conversation, word for word."""
    said = [(m["role"], text_of(m)) for m in messages]
    paths: dict[str, list[tuple[str, str]]] = {}
    for turn in turns:
        own = [(m["role"], m["content"]) for m in turn["messages"]]
        paths[turn["id"]] = [*paths.get(turn["parent"] or "", []), *own]
        if paths[turn["id"]] == said:
            return True
    return not said
