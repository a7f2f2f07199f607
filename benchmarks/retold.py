"""Conversations with several models, repeated on an undisturbed daemon, and a check of answers that must be equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from talkers import CHAT, Done, Told, ask, body_of, told_by


@dataclass(frozen=True)
class Kind:
    """A model as the daemon lists it. nbytes: of memory that the host reckons it with, at least."""

    id: str
    lineage: str
    nbytes: int


def retold(port: int, journal: Sequence[Done], kinds: Mapping[str, Kind]) -> tuple[Counter[str], list[str]]:
    """Repeat a client's requests on the daemon at `port`. Returns counts of the answers, and the wrong ones."""
    counts, failures = Counter[str](), list[str]()
    talks = {done.talk for done in journal}
    counts["conversations"] = len(talks)
    counts["with several models"] = sum(
        len({d.fields["model"] for d in journal if d.talk == talk}) > 1 for talk in talks
    )
    ways: dict[tuple[str, str], tuple[bool, int]] = {}  # of a conversation's last state of a lineage
    for done, other in _again(port, journal):
        told, kind = done.told, kinds[done.fields["model"]]
        assert told is not None
        counts.update({"turns told as stored": 1, "turns compared": 1, f"resumed {told.resume}": 1})
        counts.update({"prompt tokens": told.prompt, "cached": told.cached})
        counts["cached by the undisturbed daemon"] += other.cached
        what = f"{done.talk} {done.question!r} ({kind.id}; {told.resume}, {told.cached} of {told.prompt} cached)"
        same, least = ways.get((done.talk, kind.lineage), (True, 0))
        if told.cached < least:
            failures.append(f"{what}: the state after {least} tokens was stored, and is lost")
        way = _way(told) == _way(other)
        same = way and (same or not told.cached)
        ways[done.talk, kind.lineage] = same, told.prompt - 1
        if not same:
            counts["that came another way"] += 1
            counts["of these with another text"] += told.text != other.text
        elif (told.text, told.finish, told.tokens) == (other.text, other.finish, other.tokens):
            counts["that came the same way, bitwise equal"] += 1
            counts["of these portable"] += told.resume == "portable"
        else:
            failures.append(
                f"{what}: other log probabilities than the undisturbed daemon's: {told.text!r}, {other.text!r}; "
                f"by {_difference(told, other)}"
            )
    return counts, failures


def _way(told: Told) -> tuple[Any, ...]:
    """Return where the reading of an answer's prompt began, which determines its calls."""
    return told.resume, told.cached, told.prompt


def _difference(told: Told, other: Told) -> float:
    pairs = zip(told.tokens, other.tokens, strict=False)
    return max((abs(a["logprob"] - b["logprob"]) for a, b in pairs), default=0.0)


def _again(port: int, journal: Sequence[Done]) -> Iterator[tuple[Done, Told]]:
    """Yield each turn with another daemon's answer to it."""
    for done in journal:
        fields = {name: value for name, value in done.fields.items() if name != "keep_alive"}
        answer = ask(port, "POST", CHAT, body_of("", done.messages, fields))
        assert answer.status == 200, answer
        yield done, told_by(answer.body, fields["stream"])
