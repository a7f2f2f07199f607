"""Answers as they are stored with their turns, and their events again for a request that is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from ssmd.engine.decode.choice import Choice
from ssmd.engine.decode.generation import GenerationInput
from ssmd.engine.request import LEAST_LOGPROB, CallDelta, Delta, Event, Finish, TokenLogprob, Usage, joined
from ssmd.sessions.reply import NewReply, Reply, ReplyKey
from ssmd.text.messages import THINK_END, Message

TEXT, REASONING, CALL = 0, 1, 2  # kinds of deltas in `cuts_of`


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
    return NewReply(key, complete, answer, _facts(asked, choices, done))


def _facts(asked: GenerationInput, choices: Sequence[Choice], done: Finish) -> dict[str, Any] | None:
    """Return the facts to keep with the answer's turn: those of its request, and how it went.

    A request whose facts have `cuts` gets there how its deltas cut the answer, so that they can be sent again. `said`
    are the parts that were sent, where those of the stored answer are others.
    """
    facts = asked.request.facts
    if facts is None:
        return None
    usage = asdict(done.usage) | {"remote": None}  # the turn is sent later, or not
    how: dict[str, Any] = {"created": asked.created, "begun": len(asked.prompt.begun), "usage": usage}
    if "cuts" in facts:
        how["cuts"] = cuts_of(choices[0].deltas)
    begun, (choice, *_) = asked.prompt.begun, choices
    said = _sent(choice.deltas)
    if said != _stored(Message("assistant", begun + choice.text, tool_calls=choice.calls), len(begun)):
        how["said"] = said
    return {**facts, **how, "finish_reason": done.finish_reasons[0]}


def parts_of(answer: Message, facts: Mapping[str, Any]) -> list[Delta]:
    """Return the parts of a stored answer in the order in which they were sent: reasoning, text, and whole calls."""
    said = facts.get("said")
    parts = []
    for kind, text, *named in _stored(answer, facts.get("begun", 0)) if said is None else said:
        if kind < CALL:
            parts.append(Delta(0, text, reasoning=kind == REASONING))
        else:
            id_, name = named
            number = sum(part.call is not None for part in parts)
            parts.append(Delta(0, "", call=CallDelta(number, id_, name, text)))
    return parts


def _sent(deltas: Sequence[Delta]) -> list[list[Any]]:
    """Return the parts of an answer as they were sent: [kind, text], or [CALL, arguments, id, name]."""
    parts: list[tuple[list[Any], list[str]]] = []
    for delta in deltas:
        call, kind = delta.call, REASONING if delta.reasoning else TEXT
        if call is not None:
            if call.name:
                parts.append(([CALL, call.id, call.name], []))
            parts[-1][1].append(call.arguments)
        elif delta.text or delta.logprobs:
            if not parts or parts[-1][0] != [kind]:
                parts.append(([kind], []))
            parts[-1][1].append(delta.text)
    return [[kind, "".join(texts), *named] for (kind, *named), texts in parts]


def _stored(answer: Message, begun: int) -> list[list[Any]]:
    """Return the parts of an answer by its stored form. begun: characters that its client wrote."""
    text = answer.content[begun:]
    if THINK_END in text:
        text = text.rpartition(THINK_END)[2].lstrip("\n")
    parts: list[list[Any]] = [[REASONING, answer.reasoning]] if answer.reasoning else []
    parts += [[TEXT, text]] if text else []
    return [*parts, *([CALL, call.arguments, call.id, call.name] for call in answer.tool_calls)]


def cuts_of(deltas: Sequence[Delta]) -> list[list[int]]:
    """Return the lengths of deltas in characters, in runs of one kind: [kind, length, length, ...].

    kind: TEXT, REASONING, or CALL + the number of a call, whose first delta has its name. Empty deltas are left out,
    but for those with log-probabilities: they make an event.
    """
    runs: list[list[int]] = []
    for delta in deltas:
        call, kind = delta.call, REASONING if delta.reasoning else TEXT
        if call is not None:
            kind = CALL + call.number
        elif not delta.text and not delta.logprobs:
            continue
        if not runs or runs[-1][0] != kind or (call is not None and call.name):
            runs.append([kind])
        runs[-1].append(len(delta.text if call is None else call.arguments))
    return runs


def cut_again(runs: Sequence[Sequence[int]], parts: Sequence[Delta]) -> Iterator[Delta] | None:
    """Return the deltas of an answer as `cuts_of` found them, without log-probabilities; None if they do not fit it.

    parts: those of the stored answer.
    """
    whole: dict[int, str] = {TEXT: "", REASONING: ""}
    calls: list[CallDelta] = []
    for part in parts:
        if part.call is not None:
            whole[CALL + len(calls)] = part.call.arguments
            calls.append(part.call)
        else:
            whole[REASONING if part.reasoning else TEXT] += part.text
    lengths = dict.fromkeys(whole, 0)
    for kind, *cuts in runs:
        if kind not in lengths:
            return None
        lengths[kind] += sum(cuts)
    named = {kind for kind, *_ in runs if kind >= CALL}
    if len(named) != len(calls) or any(lengths[kind] != len(said) for kind, said in whole.items()):
        return None
    return _cut(runs, whole, calls)


def _cut(runs: Sequence[Sequence[int]], whole: Mapping[int, str], calls: Sequence[CallDelta]) -> Iterator[Delta]:
    at = dict.fromkeys(whole, 0)
    for kind, *cuts in runs:
        for i, length in enumerate(cuts):
            first, at[kind] = at[kind], at[kind] + length
            said = whole[kind][first : at[kind]]
            if kind < CALL:
                yield Delta(0, said, reasoning=kind == REASONING)
            else:
                call = calls[kind - CALL]
                named = (call.id, call.name) if i == 0 else ("", "")
                yield Delta(0, "", call=CallDelta(kind - CALL, *named, said))


def events(reply: Reply) -> list[Event]:
    """List the events that the engine would deliver for a complete reply."""
    answer = reply.answer
    given = zip(reply.texts, answer["logprobs"], strict=True)
    plain = [Delta(i, text[answer["begun"] :], tuple(map(_from_json, p))) for i, (text, p) in enumerate(given)]
    told = answer.get("said", [None] * len(plain))  # an earlier version stored only text
    deltas = [delta for said, one in zip(told, plain, strict=True) for delta in _deltas(said, one)]
    return [*deltas, Finish(tuple(answer["finish_reasons"]), _usage(answer["usage"]))]


def can_replay(reply: Reply) -> bool:
    """Return True if a reply has all that its events need. One of another machine may have anything."""
    try:
        answer = reply.answer
        is_text = isinstance(answer["id"], str) and isinstance(answer["created"], int)
        last = events(reply)[-1]
        return is_text and isinstance(last, Finish) and len(last.finish_reasons) == len(reply.texts)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return False


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
