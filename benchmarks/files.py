"""Altered session files, imported: by the product's importer, in a process whose memory is bounded, and over HTTP."""

from __future__ import annotations

import json
import random
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from databases import SLOW_S, Case, Complaints, Talk, Tester
from forging import altered
from fuzz_session_file import apart, words_in
from hostile import split
from serving import Served
from talkers import SESSIONS, told_by

OVER_HTTP = 40  # one of so many
OCTETS = {"content-type": "application/octet-stream"}
REFUSED = {400: {"invalid_session_file"}}


def run(path: Path, first: int, count: int, seed: str, folder: Path) -> tuple[Counter[str], list[str]]:
    """Alter and import `count` files. Counts by kind; failures, each with its case."""
    counts, failures = Counter[str](), list[str]()
    here = -(-count // OVER_HTTP)
    (folder / "importer").mkdir()
    try:
        told = apart(folder / "importer", seed, first, count - here)
        for what, number in told["outcomes"].items():
            kind, _, became = what.partition("/")
            counts.update({f"{kind}/injected": number, f"{kind}/{became}": number})
        if max(told["mapped"], told["resident"]) > told["limit"] // 2:
            failures.append(f"{told['mapped'] >> 20} MiB are mapped after files of some KB")
    except AssertionError as err:
        failures.append(f"from case {first}: {err}")
    tester = Tester(path, folder)
    with Complaints() as complaints, tester.daemon(tester.stores.closed) as served:
        sender = Sender(tester, served)
        for number in range(first + count - here, first + count):
            case = Case()
            try:
                kind, became = sender.send(random.Random(f"{seed}:{number}"), case)
                counts.update((f"{kind}, over HTTP/injected", f"{kind}, over HTTP/{became}"))
            except Exception:
                case.failures.append(traceback.format_exc()[-2000:])
            failures += [f"case {number}: {failure}" for failure in (*case.failures, *complaints.taken())]
    return counts, failures


class Sender:
    """Sends files to a daemon that has conversations of its own."""

    def __init__(self, tester: Tester, served: Served) -> None:
        self.tester, self.served = tester, served
        self.before = tester.see(served, Case())
        talks = [tester.talks[name] for name in ("A", "B")]
        self.talks = [(talk, self._export(talk.session, query)) for talk in talks for query in ("", "?state=all")]

    def _export(self, session: str, query: str) -> bytes:
        return self.served.ask("GET", f"{SESSIONS}/{session}/export{query}").body

    def send(self, rng: random.Random, case: Case) -> tuple[str, str]:
        """(kind, what became of it)"""
        talk, file = rng.choice(self.talks)
        kind, sent = altered(rng, [file])
        began = time.monotonic()
        answer = self.served.ask("POST", f"{SESSIONS}/import", sent, OCTETS)
        if time.monotonic() - began > SLOW_S:
            case.failures.append(f"{kind}: an import took {time.monotonic() - began:.0f} s")
        became = "refused"
        if answer.status == 201:
            became = "text only" if answer.json["text_only"] else "imported"
            self._look(case, kind, talk, sent, answer.json)
            gone = self.served.ask("DELETE", f"{SESSIONS}/{answer.json['id']}")
            if gone.status != 200:
                case.failures.append(f"{kind}: removal: {gone.status} {gone.body!r}")
        elif answer.error["code"] not in REFUSED.get(answer.status, ()):
            case.failures.append(f"{kind}: {answer.status} {answer.body!r}")
        if (became == "refused" and kind == "rewritten") or (
            became != "refused" and kind == "damaged" and sent != file
        ):
            case.failures.append(f"a file that was {kind} is {became}: {answer.body[:300]!r}")
        if self.tester.see(self.served, case) != self.before:
            case.failures.append(f"{kind}, {became}: the sessions are others than before")
        honest = self._next(talk, talk.session)
        self.tester.judge(case, f"beside a file that was {kind}", talk, honest)
        return kind, became

    def _look(self, case: Case, kind: str, talk: Talk, sent: bytes, made: dict[str, Any]) -> None:
        """The words are those of the file; its states, where they are those of the talk, go on to the last bit."""
        found = self.served.ask("GET", f"{SESSIONS}/{made['id']}").json["turns"]
        words = [[(m["role"], m["content"]) for m in turn["messages"]] for turn in found]
        if words != [[(role, content) for role, content, _ in said] for _, said in words_in(split(sent))]:
            case.failures.append(f"{kind}: other words than those of the file: {json.dumps(found)}")
        answer = self._next(talk, made["id"])
        if kind == "rewritten":
            self.tester.judge(case, "a file that was rewritten", talk, answer)
        elif answer.status != 200:
            case.failures.append(f"{kind}: an import cannot go on: {answer.status} {answer.body!r}")
        else:
            told_by(answer.body, streamed=False)

    def _next(self, talk: Talk, session: str) -> Any:
        """Ask the next question, and keep nothing of it."""
        name = next(name for name, one in self.tester.talks.items() if one is talk)
        return self.tester.next(self.served, name, talk, session=session, store=False)
