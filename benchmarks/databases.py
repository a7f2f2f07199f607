"""Damaged databases, opened by the product: a right answer, an honest refusal or a repair, and never a wrong answer.

Each case damages a copy of a store in one way, and then does with it what a user would: `ssmd session check` on a copy,
the daemon, the next question in each conversation by its messages or its id, the lists of sessions; then, if the check
found anything, `--repair`, a second check and the same questions again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon import CHAT
from damage import Damaged, Stores, inflict
from engines import OwnEngine, hosting
from serving import Answer, Served, serving
from talkers import SESSIONS, Told, told_by

from ssmd.app import create_app
from ssmd.config import Settings
from ssmd.model.artifact import MANIFEST, Artifact
from ssmd.runtime.protocol import Program, get_runtime
from ssmd.sessions.fsck.repair import CheckReport, check, repair
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

SLOW_S = 20.0
NEAR = 2e-5  # of a log probability: a state that was read anew; 4e-7 is usual. Those of other words are 3e-4 away
GO_ON = "Go on, please, "  # and the conversation's name: those of equal words share states
TALKS = {
    "A": ("You keep a lighthouse and answer in few words.", ["Who is there?", "And now?", "Tell me a story."]),
    "B": ("You are a bridge over a river.", ["What is 12 + 30?", "Why so?", "Again!"]),
    "C": ("You keep a lighthouse and answer in few words.", ["The secret is Paris.", "Which secret?"]),
}
OTHERS = {"D": ("You are a door.", ["Open?", "Close?", "Who has the key?"])}
# No checksum covers these, and nothing else says what they were: whose a turn is, what a session is called, and when.
UNSAID = {
    *("turn.session", "turn.owner", "session.base", "session.root", "session.clock", "session.head", "session.title"),
    *("session.model", "session.lineage", "session.owner", "session.imported", "session.pinned", "session", "turn"),
}
EXPECTED = {404: {"session_not_found"}, 503: {"store_error"}}
Tree = dict[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Talk:
    """A conversation. told: the answer of the undamaged store's daemon to the next question."""

    session: str
    messages: list[dict[str, str]]
    told: Told | None = None
    only_by_id: bool = False


@dataclass(frozen=True)
class Shown:
    """The sessions as a daemon shows them. words: the conversation down to each turn. lists: the turns of each."""

    words: Tree
    lists: dict[str, frozenset[str]]


@dataclass
class Case:
    """The findings of a case. exact: every answer was the undamaged store's to the last bit."""

    failures: list[str] = field(default_factory=list)
    exact: bool = True
    refused: bool = False
    unopened: bool = False


class Tester:
    """An example of a store, and the program that all its daemons share."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.artifact, self.folder = Artifact.open(path), folder
        self.program: Program = get_runtime(self.artifact.manifest.runtime).load(self.artifact, threads=1)
        self.bias = lone_bias(path)
        self.talks: dict[str, Talk] = {}
        self.stores = Stores(*(folder / name for name in ("closed", "killed", "earlier", "other")))
        self._make()

    @contextlib.contextmanager
    def daemon(self, data: Path) -> Iterator[Served]:
        store = Store.open(data)
        engine = OwnEngine(self.artifact, self.program, store)
        engine.start()
        host = hosting(engine)
        try:
            with serving(create_app(host, Settings())) as served:
                yield served
        finally:
            host.shutdown(0)  # which leaves the program for the next one
            store.close()

    def ask(self, served: Served, messages: list[dict[str, str]], **fields: Any) -> Answer:
        body = {"model": self.artifact.manifest.name, "messages": messages, "temperature": 0, "max_tokens": 3}
        body |= {"logprobs": True, "top_logprobs": 20, "logit_bias": self.bias}
        return served.ask("POST", CHAT, {**body, **fields}, timeout=3 * SLOW_S)

    def _talk(self, served: Served, system: str, questions: list[str]) -> Talk:
        messages = [{"role": "system", "content": system}]
        for question in questions:
            messages.append({"role": "user", "content": question})
            told = told_by(self.ask(served, messages, temperature=1.0, seed=len(question)).body, streamed=False)
            messages.append({"role": "assistant", "content": told.text})
        return Talk(told.session, messages)

    def _make(self) -> None:
        with self.daemon(self.folder / "others") as served:
            self._talk(served, *OTHERS["D"])
            self.other = self.see(served, Case())
            _copy(self.folder / "others", self.stores.other)
        data = self.folder / "making"
        with self.daemon(data) as served:
            self.talks["A"] = self._talk(served, *TALKS["A"])
            time.sleep(1.2)  # the writer moves the log into the file, so that it has but a part of what follows
            _copy(data, self.stores.earlier)
            self.talks |= {name: self._talk(served, *TALKS[name]) for name in ("B", "C")}
            again = self.talks["A"].messages[:-1]
            self.ask(served, again, temperature=1.0, seed=1)  # a sibling; then A's own branch is the head again
            fork = served.ask("POST", f"{SESSIONS}/{self.talks['B'].session}/fork", {}).json["id"]
            file = served.ask("GET", f"{SESSIONS}/{self.talks['C'].session}/export").body
            taken = served.ask("POST", f"{SESSIONS}/import", file, {"content-type": "application/octet-stream"})
            self.talks["fork"] = Talk(fork, self.talks["B"].messages)
            self.talks["import"] = Talk(taken.json["id"], self.talks["C"].messages, only_by_id=True)
            _copy(data, self.stores.killed)
        data.rename(self.stores.closed)
        _copy(self.stores.killed, data)
        with self.daemon(data) as served:
            self.shown = self.see(served, Case())
            for name, talk in self.talks.items():
                told = told_by(self.next(served, name, talk, session=talk.session).body, streamed=False)
                assert told.resume == "exact", told
                self.talks[name] = Talk(talk.session, talk.messages, told, talk.only_by_id)
        first = [t.told.tokens[0]["top_logprobs"] for t in self.talks.values() if t.told is not None]
        for a, b in itertools.combinations(first, 2):
            assert far([{"top_logprobs": a}], [{"top_logprobs": b}]) > 10 * NEAR

    def next(self, served: Served, name: str, talk: Talk, *, session: str | None, **fields: Any) -> Answer:
        """Ask the next question of a conversation, in its session or by its words alone."""
        named = {} if session is None else {"session": session}
        return self.ask(served, [*talk.messages, {"role": "user", "content": GO_ON + name}], **named, **fields)

    def see(self, served: Served, case: Case) -> Shown:
        """Return all sessions and their turns, as a daemon shows them."""
        words: Tree = {}
        lists: dict[str, frozenset[str]] = {}
        listed = self._asked(case, "the list", served.ask("GET", f"{SESSIONS}?limit=1000"))
        for session in listed["data"] if listed else ():
            if not session["id"]:  # altered to an id that cannot be requested
                continue
            found = self._asked(case, "a session", served.ask("GET", f"{SESSIONS}/{session['id']}"))
            turns = found["turns"] if found else []
            for turn in turns:
                own = tuple((m["role"], m["content"]) for m in turn["messages"])
                words[turn["id"]] = (*words.get(turn["parent"] or "", ()), *own)
            lists[session["id"]] = frozenset(t["id"] for t in turns)
        return Shown(words, lists)

    def _asked(self, case: Case, what: str, answer: Answer) -> Any:
        """Return the answer, or None if it is an honest refusal."""
        if answer.status == 200:
            return answer.json
        case.refused = True
        if answer.error["code"] not in EXPECTED.get(answer.status, ()):
            case.failures.append(f"{what}: {answer.status} {answer.body!r}")
        return None

    def use(self, rng: random.Random, data: Path, case: Case, *, repaired: bool = False) -> Shown | None:
        """Serve a store, look at its sessions, and ask the next question in each. None if it cannot be opened."""
        try:
            with self.daemon(data) as served:
                before = self.see(served, case)
                for name, talk in sorted(self.talks.items(), key=lambda _: rng.random()):
                    by_id = talk.only_by_id or rng.random() < 0.5
                    began = time.monotonic()
                    answer = self.next(served, name, talk, session=talk.session if by_id else None)
                    if (took := time.monotonic() - began) > SLOW_S:
                        case.failures.append(f"{name}: an answer took {took:.0f} s")
                    if self._asked(case, f"{name}, by id {by_id}", answer) is not None:
                        self.judge(case, f"{name}, by id {by_id}", talk, answer, repaired=repaired)
                return before
        except StoreError:
            case.unopened = True
            return None

    def judge(self, case: Case, name: str, talk: Talk, answer: Answer, *, repaired: bool = False) -> None:
        """Compare an answer with that of the undamaged store. repaired: what was read anew was kept, and is exact."""
        told, right = told_by(answer.body, streamed=False), talk.told
        assert right is not None
        same = (told.text, told.tokens) == (right.text, right.tokens)
        case.exact &= same and told.cached == right.cached
        if same:
            return
        away = far(told.tokens, right.tokens)
        what = f"{name}: {told.resume}, {told.cached} cached (of {right.cached}), {told.text!r} for {right.text!r}"
        what += f", {away:.2g} away"
        if told.text != right.text or away > NEAR:
            case.failures.append(f"a wrong answer: {what}")
        elif told.resume == "exact" and told.cached >= right.cached and not repaired:
            case.failures.append(f"other bits are called exact: {what}")


def lone_bias(artifact: Path) -> dict[str, float]:
    """Forbid all tokens but characters that are part of no other: what is read anew then has the same tokens."""
    model = json.loads((artifact / "tokenizer.json").read_text())["model"]
    merged = {part for pair in model["merges"] for part in (pair.split() if isinstance(pair, str) else pair)}
    lone = {token for token in map(chr, range(33, 127)) if token in model["vocab"] and token not in merged}
    allowed = {number for token, number in model["vocab"].items() if token in lone}
    padded = json.loads((artifact / MANIFEST).read_text())["vocabulary"]  # ids of no token have no text
    return {str(number): -100.0 for number in range(padded) if number not in allowed}


def far(told: list[Any], right: list[Any]) -> float:
    """Return the largest difference of log probabilities from the right ones."""
    pairs = [
        p for a, b in zip(told, right, strict=False) for p in zip(a["top_logprobs"], b["top_logprobs"], strict=False)
    ]
    return max((abs(a["logprob"] - b["logprob"]) for a, b in pairs), default=0.0)


def _copy(data: Path, to: Path) -> None:
    """The database and its log, as a daemon that is killed now would leave them."""
    to.mkdir()
    for name in (FILE, f"{FILE}-wal"):
        if (data / name).exists():
            shutil.copy(data / name, to / name)


def looked(data: Path, folder: Path) -> CheckReport | None:
    """Return the result of `ssmd session check` on a copy; None if it cannot open it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data, folder)
    try:
        return check(folder)
    except StoreError:
        return None


class Complaints(logging.Handler):
    """A handler that collects tracebacks that are logged meanwhile, and those that end a thread."""

    def __enter__(self) -> Complaints:
        self._kept: list[str] = []
        self._before, threading.excepthook = threading.excepthook, self._end_of_thread
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        threading.excepthook = self._before

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._kept.append("".join(traceback.format_exception(*record.exc_info))[-1500:])

    def _end_of_thread(self, args: threading.ExceptHookArgs) -> None:
        self._kept.append("".join(traceback.format_exception(args.exc_value))[-1500:])

    def taken(self) -> list[str]:
        """Return the new tracebacks, each only once."""
        kept, self._kept = self._kept, []
        return kept


def run(path: Path, first: int, count: int, seed: str, folder: Path) -> tuple[Counter[str], list[str]]:
    """Damage and use a store `count` times. Counts by kind of damage; failures, each with its case."""
    tester = Tester(path, folder)
    counts, failures = Counter[str](), list[str]()
    with Complaints() as complaints:
        for number in range(first, first + count):
            print(f"case {number}", file=sys.stderr)
            rng, case = random.Random(f"{seed}:{number}"), Case()
            damaged = inflict(rng, tester.stores, folder / "data")
            try:
                verdicts = examine(tester, rng, folder, damaged, case)
            except Exception:
                verdicts = []
                case.failures.append(traceback.format_exc()[-2000:])
            case.failures += complaints.taken()
            verdicts = ["injected", *verdicts, *(["failures"] if case.failures else [])]
            counts.update(f"{damaged.kind}/{verdict}" for verdict in verdicts)
            failures += [f"case {number}, {damaged.kind}, {damaged.what}: {failure}" for failure in case.failures]
    return counts, failures


def examine(tester: Tester, rng: random.Random, folder: Path, damaged: Damaged, case: Case) -> list[str]:
    data = folder / "data"
    before = looked(data, folder / "copy")
    found = before is None or bool(before.damages)
    shown = tester.use(rng, data, case)
    verdicts = ["found by check"] if found else []
    if shown is None:
        verdicts.append("not opened")
        if not found:
            case.failures.append("the check finds nothing, and the store cannot be opened")
    elif case.refused:
        verdicts.append("a request refused")
    else:
        verdicts.append("right, to the bit" if case.exact else "right, read anew")
    if shown is not None and not found:
        verdicts += differences(tester, shown, damaged, case)
    after = looked(data, folder / "copy")
    if after is not None and not after.damages and before is not None and before.damages:
        verdicts.append("healed by use")
    if not found and (after is None or after.damages):
        case.failures.append(f"was sound, and is not after it was used: {after and after.damages[0]}")
    if after is None or after.damages:
        verdicts += mended(tester, rng, data, folder, case)
    return verdicts


def differences(tester: Tester, shown: Shown, damaged: Damaged, case: Case) -> list[str]:
    """Return the differences that a daemon shows in a store in which no check finds a fault."""
    if damaged.kind == "log" and shown == tester.other:  # each page of it is in that log
        return ["another moment"]
    right = tester.shown
    wrong = [t for t, words in shown.words.items() if words != right.words.get(t, words)]
    if wrong or set(shown.words) - set(right.words):
        case.failures.append(f"altered words are shown, and no check finds it: {wrong or set(shown.words)}")
    if shown.lists == right.lists:
        return []
    if damaged.column in UNSAID:
        return ["undetected by design"]
    # A first page says how long the file is, and where its tables begin: of another moment it hides what came after.
    if (damaged.kind == "log" or ": page 0 of" in damaged.what) and set(shown.words) <= set(right.words):
        return ["another moment"]
    case.failures.append(f"other turns in a session, and no check finds it: {shown.lists} for {right.lists}")
    return []


def mended(tester: Tester, rng: random.Random, data: Path, folder: Path, case: Case) -> list[str]:
    """Repair; then the store is sound, its words are the right ones, and the answers too."""
    try:
        done = repair(data)
    except StoreError as err:
        if "could not be repaired" in str(err):
            case.failures.append(str(err))
        return ["beyond repair"]
    after = looked(data, folder / "copy")
    if after is None or after.damages:
        case.failures.append(f"not sound after a repair: {after and after.damages[0]}")
    again, known = Case(), set(tester.shown.words.values())
    shown = tester.use(rng, data, again, repaired=True)
    case.failures += [f"after a repair: {failure}" for failure in again.failures]
    if shown is None:
        case.failures.append("not opened after a repair")
    elif strange := [w for w in shown.words.values() if w not in known and not is_new(w)]:
        # Docs: what does not match its hash any more stays as it can be read. The repair has to say so.
        if not any("do not match their hash" in damage.problem for damage in done.damages):
            case.failures.append(f"after a repair other words are shown: {json.dumps(strange[0])}")
        return ["sound after --repair", "with altered words, as it says"]
    return ["sound after --repair"]


def is_new(words: tuple[tuple[str, str], ...]) -> bool:
    """Return True if the last turn is one that the case itself requested."""
    return any(content.startswith(GO_ON) for _, content in words[-2:])
