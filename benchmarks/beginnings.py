"""SIGKILLs of a daemon whose clients share beginnings, mark places, seal states, leave out turns and keep prompts warm.

An episode is as one of kills.py. Its prompts are long, and part anywhere. The daemon may have a small quota. Where a
state went, by a kill or by the quota, words are read anew: then an answer has the control's log probabilities within
NEAR. Else it has its bits.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import commands
from databases import NEAR, far, lone_bias
from forked import DaemonProcess
from kills import ROWS, Episode
from talkers import WORDS, Done, Talk, Talker, Told, ask, text_of

from ssmd.sessions.store import Store

WARM = "/ssmd/v1/warm"
READERS = 5
MOST_ANSWERS = 16  # between two kills
SMALL = "2MB"  # some ten states of a tiny model
BOOK_WORDS = 45  # some 200 tokens of the 512 that a tiny model's context has
BOOKS = [" ".join(random.Random(f"book {n}").choices(WORDS, k=BOOK_WORDS)) for n in range(3)]
OWN: dict[str, dict[str, Any]] = {
    "stored": {},
    "sealed": {"store": False},
    "sealed in memory": {"store": False, "prompt_cache_retention": "in_memory"},
    "without their oldest turns": {"truncation": "auto"},
}
LEAST_WORDS = 12  # characters of a text that is looked for on the disk; other conversations may say shorter ones too
MARK = {"cache_control": {"type": "ephemeral"}}


class Reader(Talker):
    """A client with long prompts. Each of its conversations is of a kind of OWN, and begins with a book or a part."""

    def step(self) -> None:
        x = self.rng.random()
        going = [t for t in self.talks if not t.lost and (t.session or not t.stores)]
        if not going or x < 0.25:
            self._begin()
            self.turn(self.talks[-1])
            return
        talk = self.rng.choice(going[-4:])
        if x < 0.70 or not talk.stores:
            self.turn(talk, anew=self.rng.random() < 0.15)
        elif x < 0.78:
            self._reword(talk)
        elif x < 0.84:
            self.edit(talk)
        elif x < 0.89:
            self.fork(talk)
        elif x < 0.93:
            self.export(talk)
        elif x < 0.95 and self._files:
            self.take_in(*self.rng.choice(self._files))
        elif x < 0.97:
            self.delete(talk)
        else:
            self.look(talk)

    def turn(self, talk: Talk, anew: bool = False) -> None:
        self.most_questions = 12 if "truncation" in talk.own else 5
        super().turn(talk, anew)

    def _begin(self) -> None:
        """Open a conversation whose beginning is another one's up to some word."""
        self._talks += 1
        kind = self.rng.choice(list(OWN))
        self.counts[f"conversations {kind}"] += 1
        book = self.rng.choice(BOOKS).split()
        at = self.rng.randrange(len(book))
        first, rest = " ".join(book[:at]) + " ", " ".join(book[at:])
        mine = f"{self.name}-{self._talks} "
        form = self.rng.choice(["whole", "parted", "marked", "reminder"])
        content: Any = first + rest
        if form == "parted":
            content = first + mine + rest
        elif form == "marked":
            content = [{"type": "text", "text": first, **MARK}, {"type": "text", "text": mine + rest}]
        messages: list[dict[str, Any]] = [{"role": "system", "content": content}]
        if form == "reminder":
            messages.append({"role": "user", "content": f"Remember {first}"})
        self.talks.append(Talk(mine.strip(), messages=messages, own=OWN[kind]))

    def _reword(self, talk: Talk) -> None:
        """Open a conversation that is a stored one up to some word of a question."""
        asked = [i for i, m in enumerate(talk.messages) if m["role"] == "user"]
        at = self.rng.choice(asked)
        self._talks += 1
        other = Talk(f"{self.name}-{self._talks}", messages=talk.messages[:at], own=talk.own)
        other.messages[-1:] = [m for m in other.messages[-1:] if m["role"] != "user"]
        words = text_of(talk.messages[at]).split()
        self._next = " ".join(words[: self.rng.randint(1, len(words))])
        self.talks.append(other)
        self.turn(other)

    _next = ""

    def _question(self) -> dict[str, str]:
        asked = super()._question()
        begun, self._next = self._next, ""
        return {**asked, "content": f"{begun} {asked['content']}"} if begun else asked


class Warmer(Talker):
    """A client that keeps beginnings warm, by HTTP and by the command, and asks with them.

    kept: by name, the beginning and whether its state is there by what the daemon or the command said.
    """

    def __init__(self, name: str, rng: random.Random, episode: Beginnings) -> None:
        super().__init__(name, rng, episode.line, episode.failures.append)
        self._episode, self._data = episode, episode.folder / "data"
        self.kept: dict[str, tuple[str, bool]] = {}
        self.unsure: set[str] = set()  # names that something is under way for

    def sure(self) -> dict[str, tuple[str, bool]]:
        """Return what is kept under names that nothing is under way for."""
        return {name: one for name, one in tuple(self.kept.items()) if name not in tuple(self.unsure)}

    def step(self) -> None:
        x = self.rng.random()
        if not self.kept or x < 0.2:
            self._read()
        elif x < 0.7:
            self._ask()
        elif x < 0.8:
            self._list()
        elif x < 0.95:
            self._move()
        elif len(self.kept) > 1:
            self._let_go()

    def _read(self) -> None:
        name = f"w{self.rng.randrange(3)}"
        text = f"{name} {self.rng.randrange(10**6)} {self.rng.choice(BOOKS)}"
        idle = self.rng.random() < 0.3
        system = [{"role": "system", "content": text}]
        body = {"model": self.line.model, "messages": system, "name": name, "idle": idle}
        self.unsure.add(name)
        answer, _ = self.again(lambda port: ask(port, "POST", WARM, body))
        if answer.status == 507:  # a commit of a state has 2 s, on a busy machine too
            self.counts["told that it was not stored"] += 1
            return
        if answer.status != 200:
            self.fail(f"a warm beginning: {answer.status} {answer.body!r}")
            return
        self.counts["warm beginnings read"] += 1
        self.kept[name] = text, answer.json["ready"]
        self.unsure.discard(name)

    def _ask(self) -> None:
        name = self.rng.choice(list(self.kept))
        text, ready = self.kept[name]
        self._talks += 1
        own = {} if self.rng.random() < 0.5 else {"store": False}
        talk = Talk(f"{self.name}-{self._talks}", messages=[{"role": "system", "content": text}], own=own)
        before = len(self.journal)
        self.turn(talk)
        if ready and len(self.journal) > before and (told := self.journal[-1].told) is not None:
            self.counts["questions to a warm beginning"] += 1
            if told.cached < 64 or told.resume != "exact":
                self.fail(f"{name} was told as ready: {told.resume}, {told.cached} of {told.prompt} cached")

    def _list(self) -> None:
        answer, _ = self.again(lambda port: ask(port, "GET", WARM))
        there = {one["name"]: one for one in answer.json["data"]}
        for name, (_, ready) in self.kept.items():
            if name not in there:
                self.fail(f"the warm beginning {name} is gone")
            elif ready and not there[name]["ready"]:
                self.fail(f"the warm beginning {name} was told as ready, and is not")

    def _let_go(self) -> None:
        name = self.rng.choice(list(self.kept))
        self.unsure.add(name)
        self._command("--rm", name)
        del self.kept[name]

    def _move(self) -> None:
        """Export one by the command, and import it under another name."""
        name = self.rng.choice(list(self.kept))
        text, _ = self.kept[name]
        file, other = self._episode.folder / f"{name}.ssmd", f"i{self.rng.randrange(3)}"
        trust = self.rng.random() < 0.5
        if not self.kept[name][1] or not self._command(name, "--export", str(file), "--force"):
            return
        self.counts["warm beginnings exported"] += 1
        self.unsure.add(other)
        if self._command(str(file), "--name", other, *(["--trust"] if trust else [])):
            self.counts["warm beginnings imported"] += 1
            self.kept[other] = text, trust
            self.unsure.discard(other)

    def _command(self, *words: str) -> bool:
        """Run `ssmd warm` until it succeeds; the daemon may be killed meanwhile. False if the run is over."""
        said = ""
        for attempt in range(20):
            if self.line.over:
                return False
            done = commands.ssmd("warm", *words, "--data-dir", str(self._data), env=self._episode.environment)
            said = f"{done.stdout[-300:]} {done.stderr[-1500:]}"
            if "Traceback" in said:
                self.fail(f"ssmd warm {' '.join(words)}: {said}")
                return False
            if done.returncode == 0:
                return True
            if attempt and "--rm" in words and "no warm beginning" in said:
                return True  # a killed daemon had removed it
            self.counts["commands that died with the daemon"] += 1
        self.fail(f"ssmd warm {' '.join(words)} did not succeed in 20 attempts: {said}")
        return False


class Beginnings(Episode):
    """One data directory with such clients.

    Daemons and commands are forked from a process that has the imports: on a busy machine these take a minute.
    """

    served_by = DaemonProcess
    rows = (
        *ROWS,
        *(f"conversations {kind}" for kind in OWN),
        *("warm beginnings read", "warm beginnings exported", "warm beginnings imported"),
        *("questions to a warm beginning", "commands that died with the daemon", "told that the text alone was stored"),
        *("bitwise equal", "read anew, near"),
    )

    def __init__(
        self, artifact: Path, model: str, seed: str, kills: int, folder: Path, options: tuple[str, ...] = ()
    ) -> None:
        """options: of the daemon that is killed."""
        self._options = options
        self.folder = folder
        super().__init__(artifact, model, seed, kills, folder)
        self.line.bias = lone_bias(artifact)
        models = str(artifact.parents[1])
        self.environment = {**os.environ, "SSMD_DATA_DIR": str(folder / "data"), "SSMD_MODELS_DIR": models}
        self._apart: set[str] = set()  # of these some words were read anew
        self._sure: dict[str, tuple[str, bool]] = {}  # what was kept before the last copy
        self._stateless: set[str] = set()  # of these a client was told that the text alone was stored

    def options(self) -> tuple[str, ...]:
        return self._options

    def clients(self, seed: str) -> list[Talker]:
        readers = [
            Reader(f"c{i}", random.Random(f"{seed}:{i}"), self.line, self.failures.append) for i in range(READERS)
        ]
        self.warmer = Warmer("w", random.Random(f"{seed}:w"), self)
        return [*readers, self.warmer]

    def wait_under_load(self) -> None:
        """Wait for some answers: on a busy machine a second brings none."""
        self.line.wait_for_answers(self.rng.randrange(MOST_ANSWERS), 30)
        super().wait_under_load()

    def look(self) -> None:
        self._sure = self.warmer.sure()
        super().look()

    def has_all(self, data: Path, when: str) -> None:
        super().has_all(data, when)
        kept = dict(self.warmer.sure())
        if (
            when == "after a kill"
        ):  # commands go on while no daemon runs: those under way when it was copied do not count
            kept = {name: one for name, one in kept.items() if self._sure.get(name) == one}
        with contextlib.closing(Store.open(data)) as store:
            there = {one.session.title: one.ready for one in store.warm()}
        for name, (_, ready) in kept.items():
            if ready and not there.get(name):
                self.failures.append(f"{when} the warm beginning {name} is {there.get(name)}, told as ready")
        files = (file for file in data.rglob("*") if file.is_file())
        raw = b"".join(file.read_bytes() for file in (*files, self.folder / "data.log"))
        stored = self._words(stores=True)
        elsewhere = "\n".join(stored)
        if found := [text for text in self._words(stores=False) if text not in elsewhere and text.encode() in raw]:
            self.failures.append(f"{when} words of `store: false` are on disk: {found[:3]}")
        if when == "at the end" and stored and not any(text.encode() in raw for text in stored):
            self.failures.append("the search of the disk does not find the words of stored conversations")

    def _words(self, *, stores: bool) -> set[str]:
        """Return the questions and longer answers of conversations that are stored, or of those that are not."""
        done = [(d, d.told) for t in self.talkers for d in tuple(t.journal) if d.stores == stores]
        said = {text for d, told in done if told is not None for text in (d.question, told.text)}
        return {text for text in said if len(text) >= LEAST_WORDS}

    def judge(self, done: Done, control: Told) -> None:
        told = done.told
        assert told is not None
        if not done.stores and (told.resume not in ("exact", "none") or (told.resume == "none") != (told.cached == 0)):
            self.failures.append(f"{_what(done)}: a sealed state resumed as {told.resume}, {told.cached} cached")
        own = self._root(done)
        goes_on = any(message["role"] == "assistant" for message in done.messages)
        if goes_on and told.cached < control.cached:  # else it depends on what others asked before
            self._apart.add(own)
            if done.stores and not self._options and own not in self._stateless:
                self.failures.append(f"{_what(done)}: {told.cached} of {told.prompt} cached, not {control.cached}")
        self.counts.update({"turns compared": 1, "that went on exactly": told.resume == "exact"})
        if done.stores and not told.state_stored:
            self._stateless.add(own)
            self.counts["told that the text alone was stored"] += 1
        cached = {"prompt tokens": told.prompt, "cached": told.cached, "cached by the control": control.cached}
        self.counts.update(cached)
        if (told.text, told.finish, told.prompt, told.tokens) == (
            control.text, control.finish, control.prompt, control.tokens
        ):  # fmt: skip
            self.counts["bitwise equal"] += 1
            return
        same = next((i for i, (a, b) in enumerate(zip(told.text, control.text, strict=False)) if a != b), None)
        away = far(told.tokens[:1] if same is not None else told.tokens, control.tokens)
        said = f"{told.text!r} for {control.text!r}, {away:.2g} away, {told.cached} and {control.cached} cached"
        if own not in self._apart:
            self.failures.append(f"{_what(done)}: other bits: {told.resume}, {said}")
        elif away > NEAR or told.prompt != control.prompt:
            self.failures.append(f"{_what(done)}: a wrong answer: {told.resume}, {said}")
        else:
            self.counts["read anew, near"] += 1

    def _root(self, done: Done) -> str:
        """Return the conversations that a turn may have a state of, beside those of beginnings.

        A sealed one has its own. A stored one may be a fork, or a part of any other of its client's.
        """
        return done.talk if not done.stores else done.talk.partition("-")[0].partition(".")[0]


def _what(done: Done) -> str:
    own = {name: value for name, value in done.fields.items() if name in ("store", "truncation", "stream")}
    return f"{done.talk} {done.question!r} ({own}, by id {done.by_id}, named {done.named}, attempts {done.attempts})"
