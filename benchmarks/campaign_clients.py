"""Clients of remote_campaign.py, which talk to any of several daemons and remember each attempt and its answer."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from namespaces import MachineDaemon
from talkers import CHAT, WORDS, Answer, Dead, ask, body_of, told_by

MOST_QUESTIONS = 4  # of a conversation: the tiny models that have attention have a context of 512
ATTEMPTS = 8
PATIENCE_S = 45.0  # s after a disturbance in which a daemon may not reach the remote yet: 30 s, and its connection
REPEATED = 0.25  # part of the answers with a key that are asked for again, at another daemon
Messages = list[dict[str, str]]


class Reach:
    """The daemons, and the times at which one could not reach the remote, as far as the disturbances know."""

    def __init__(self, daemons: dict[str, MachineDaemon]) -> None:
        self.daemons = daemons
        self.over = False
        self.streams = Counter[str]()  # that clients read now, by machine
        self._away: list[tuple[str, float, float]] = []
        self._lock = threading.Lock()

    def note(self, name: str, began: float, ended: float) -> None:
        """Note that a machine was cut off from the remote. name: "" for all of them."""
        with self._lock:
            self._away.append((name, began, ended))

    def was_away(self, names: set[str], began: float, ended: float) -> bool:
        """Return True if one of these machines may have been without the remote in a time, or shortly before it."""
        with self._lock:
            return any(
                (not name or name in names) and first <= ended and last >= began - PATIENCE_S
                for name, first, last in self._away
            )


@dataclass(frozen=True)
class Attempt:
    """A request to one daemon. ending: "answered", "died" or "refused"."""

    name: str
    began: float
    ended: float
    ending: str


@dataclass
class Turn:
    """A turn as a client was told it, with all attempts at it. sent: `usage.ssmd.remote`; None: it was given again."""

    question: str
    name: str
    id: str
    session: str
    messages: Messages
    text: str
    tokens: list[Any]
    cached: int
    stored: bool
    sent: str | None
    keyed: bool
    fields: dict[str, Any]
    attempts: list[Attempt]
    strays: frozenset[str]  # daemons that may have read this conversation without a word: an attempt there died
    others: list[Turn] = field(default_factory=list)  # what another daemon answered to the same request

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.attempts}


def answer_id(body: bytes, streamed: bool) -> str:
    """Return the id of an answer, which one that is given again has too."""
    first = body.partition(b"data: ")[2].partition(b"\n\n")[0] if streamed else body
    return str(json.loads(first)["id"])


def _events(body: bytes) -> bytes:
    """Return the events of a stream, without comments: a daemon sends such while a request waits."""
    return b"\n\n".join(event for event in body.split(b"\n\n") if not event.startswith(b":"))


def _sent(body: bytes, streamed: bool) -> str | None:
    parts = (
        [json.loads(e[6:]) for e in body.split(b"\n\n") if e.startswith(b"data: {")] if streamed else [json.loads(body)]
    )
    own: dict[str, Any] = next(p["usage"]["ssmd"] for p in parts if p.get("usage"))
    return own.get("remote")


class Client:
    """A client. talks: its conversations, each a list of turns as they were told."""

    def __init__(
        self, number: int, seed: str, reach: Reach, fields: dict[str, Any], fail: Callable[[str], None]
    ) -> None:
        self.number, self.rng, self.reach, self.fail = number, random.Random(f"{seed}:{number}"), reach, fail
        self.fields = fields
        self.counts = Counter[str]()
        self.talks: list[list[Turn]] = []
        self._asked = 0
        self._strays: set[str] = set()  # of the conversation that goes on

    def run(self) -> None:
        try:
            while not self.reach.over:
                self.talks.append([])
                self._strays = set()
                said: Messages = []
                at = self.rng.choice(list(self.reach.daemons))
                for _ in range(MOST_QUESTIONS):
                    before = at
                    if self.rng.random() < 0.5:
                        at = self.rng.choice(list(self.reach.daemons))
                    turn = self.turn(said, at)
                    if turn is None:
                        break
                    self.talks[-1].append(turn)
                    at = turn.name
                    self.counts["went on at another daemon"] += bool(said) and at != before
                    said = [*turn.messages, {"role": "assistant", "content": turn.text}]
        except Exception as err:
            self.fail(f"client {self.number}: {type(err).__name__}: {err}")

    def _question(self) -> str:
        self._asked += 1
        return f"c{self.number}q{self._asked} {' '.join(self.rng.choices(WORDS, k=4))}"

    def turn(self, said: Messages, at: str) -> Turn | None:
        """Ask a question, until it is answered. Without a key each attempt is another question."""
        keyed, streamed = self.rng.random() < 0.6, self.rng.random() < 0.5
        question, attempts, names = self._question(), list[Attempt](), list(self.reach.daemons)
        fields = {**self.fields, "max_tokens": self.rng.randint(4, 24), "stream": streamed}
        for number in range(ATTEMPTS):
            if self.reach.over and number:
                return None
            messages = [*said, {"role": "user", "content": question}]
            turn = self._attempt(at, question, messages, fields, keyed, attempts)
            if turn is not None:
                if keyed and turn.stored and self.rng.random() < REPEATED:
                    self._repeat(turn, [one for one in names if one != at])
                return turn
            if not keyed:
                question, attempts = self._question(), []
            self.counts["retried"] += keyed
            at = self.rng.choice([one for one in names if one != at])
            time.sleep(0.1 * number)
        return None

    def _attempt(
        self, at: str, question: str, messages: Messages, fields: dict[str, Any], keyed: bool, attempts: list[Attempt]
    ) -> Turn | None:
        daemon, streamed, began, ending = self.reach.daemons[at], fields["stream"], time.monotonic(), "refused"
        headers = {"Idempotency-Key": question.partition(" ")[0]} if keyed else {}
        self.counts["requests"] += 1
        self.reach.streams[at] += 1
        try:
            with daemon.network.inside(at):
                got = ask(daemon.port, "POST", CHAT, body_of(fields["model"], messages, fields), headers)
            if streamed:
                got = replace(got, body=_events(got.body))
            if got.status == 200:
                told = told_by(got.body, streamed)
                ending = "answered"
        except (Dead, TimeoutError):
            ending = "died"
        except ValueError as err:
            if "answered_elsewhere" not in str(err):
                self.fail(f"{question}: {err}")
        finally:
            self.reach.streams[at] -= 1
        attempts.append(Attempt(at, began, time.monotonic(), ending))
        if ending != "answered":
            self._strays.add(at)
            self.counts[ending] += 1
            if ending == "refused" and got.status not in (200, 503):
                self.fail(f"{question} at {at}: {got.status} {got.body[:300]!r}")
            return None
        sent = self._count(got, keyed, streamed)
        return Turn(
            question=question,
            name=at,
            id=answer_id(got.body, streamed),
            session=told.session,
            messages=messages,
            text=told.text,
            tokens=told.tokens,
            cached=told.cached,
            stored=told.stored,
            sent=sent,
            keyed=keyed,
            fields=fields,
            attempts=attempts,
            strays=frozenset(self._strays),
        )

    def _count(self, got: Answer, keyed: bool, streamed: bool) -> str | None:
        self.counts["first answers again"] += got.replayed
        if got.replayed and not keyed:
            self.fail("an answer is called a repetition, and its request had no key")
        sent = _sent(got.body, streamed)
        if sent is not None:
            self.counts[f"told `{sent}`"] += 1
        if (sent is None) != got.replayed:
            self.fail(f"an answer has `remote` {sent!r}, and is a repetition: {got.replayed}")
        return sent

    def _repeat(self, turn: Turn, names: list[str]) -> None:
        """Ask for an answer again at another daemon, as a client does that did not get it."""
        other = self._attempt(
            self.rng.choice(names), turn.question, turn.messages, turn.fields, keyed=True, attempts=turn.attempts
        )
        if other is not None and other.id != turn.id:
            turn.others.append(other)
            self._strays.add(other.name)
        elif other is not None and other.text != turn.text:
            self.fail(f"{turn.question!r} was answered again with another text: {other.text!r}, not {turn.text!r}")
