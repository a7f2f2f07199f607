"""Answers as they are stored with their turns, and their events again for a request that is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from typing import Any

from ssmd.engine.decode.choice import Choice
from ssmd.engine.decode.generation import GenerationInput
from ssmd.engine.request import LEAST_LOGPROB, CallDelta, Delta, Event, Finish, TokenLogprob, Usage, joined
from ssmd.sessions.reply import NewReply, Reply, ReplyKey


def keep(asked: GenerationInput, choices: Sequence[Choice], done: Finish, key: ReplyKey) -> NewReply:
    """Return the stored form of an answer, beside its turns, which are those of `choices`. done: its last event."""
    complete = len(choices) == asked.request.n and all(choice.end != "cancelled" for choice in choices)
    answer: dict[str, Any] = {"id": asked.id, "created": asked.created}
    if complete:  # an answer that broke off is never replayed
        answer |= {
            "begun": len(asked.prompt.begun),
            "finish_reasons": done.finish_reasons,
            "usage": asdict(done.usage),
            "logprobs": [[_to_json(entry) for entry in choice.logprobs] for choice in choices],
            "said": [_said(choice) for choice in choices],
        }
    return NewReply(key, complete, answer, _facts(asked, done))


def _facts(asked: GenerationInput, done: Finish) -> dict[str, Any] | None:
    """Return the facts to keep with the answer's turn: those of its request, and how it went."""
    facts = asked.request.facts
    if facts is None:
        return None
    how = {"created": asked.created, "begun": len(asked.prompt.begun), "usage": asdict(done.usage)}
    return {**facts, **how, "finish_reason": done.finish_reasons[0]}


def events(reply: Reply) -> list[Event]:
    """List the events that the engine would deliver for a complete reply."""
    answer = reply.answer
    given = zip(reply.texts, answer["logprobs"], strict=True)
    plain = [Delta(i, text[answer["begun"] :], tuple(map(_from_json, p))) for i, (text, p) in enumerate(given)]
    told = answer.get("said", [None] * len(plain))  # an earlier version stored only text
    deltas = [delta for said, one in zip(told, plain, strict=True) for delta in _deltas(said, one)]
    return [*deltas, Finish(tuple(answer["finish_reasons"]), _usage(answer["usage"]))]


def _usage(told: dict[str, Any]) -> Usage:
    """Read the usage of a stored reply. Earlier versions stored text and state together, without `state_stored`."""
    return Usage(**{"state_stored": told["stored"], **told, "remote": None})  # it is sent meanwhile, or not


def _said(choice: Choice) -> list[Any] | None:
    """Return the parts of an answer in order: reasoning, text and calls. None if it is all text."""
    if all(delta.call is None and not delta.reasoning for delta in choice.deltas):
        return None
    return [
        [delta.text, delta.reasoning, None if delta.call is None else astuple(delta.call)]
        for delta in joined(choice.deltas)
    ]


def _deltas(said: Sequence[Any] | None, whole: Delta) -> Iterator[Delta]:
    """Yield the deltas of a choice. Log-probabilities come with the first delta of plain text, or at the end."""
    logprobs = whole.logprobs
    for text, reasoning, call in said or [[whole.text, False, None]]:
        mine = logprobs if call is None and not reasoning else ()
        logprobs = () if mine else logprobs
        yield Delta(whole.index, text, mine, reasoning, None if call is None else CallDelta(*call))
    if logprobs:
        yield Delta(whole.index, "", logprobs)


def _to_json(entry: TokenLogprob) -> list[Any]:
    top = [_token(*one) for one in entry.top]
    return [*_token(entry.token, entry.utf8, entry.logprob), top]


def _from_json(entry: Sequence[Any]) -> TokenLogprob:
    token, utf8, logprob, top = entry
    return TokenLogprob(token, bytes.fromhex(utf8), logprob, tuple((t, bytes.fromhex(b), p) for t, b, p in top))


def _token(token: str, utf8: bytes, logprob: float) -> list[Any]:
    return [token, utf8.hex(), max(float(logprob), LEAST_LOGPROB)]
