"""What one request asks of the engine and what it gets back: the vocabulary between engine and API."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.terms import Grammar, Rejected
from ssmd.model.defaults import OPTIONS
from ssmd.sessions.domain import EVERYBODY, Domain
from ssmd.sessions.reply import ReplyKey
from ssmd.text.calls.tool_choice import AUTO, ToolChoice
from ssmd.text.messages import Message, ToolCall
from ssmd.text.template import NOTHING_MORE, Given

Resume = Literal["exact", "portable", "none"]
FinishReason = Literal["stop", "length", "tool_calls"]
Raw = str | tuple[int, ...]  # a prompt that no template makes
LEAST_LOGPROB = -9999.0  # of a token that cannot come, as OpenAI writes it: JSON has no -Infinity


@dataclass(frozen=True)
class Request:
    """What a client asks. `messages` is always the whole conversation. `max_tokens` is per choice.

    raw: the prompt as it is, text or ids, in place of messages; more: further ones, whose choices are numbered on.
    echo: each choice begins with its prompt.

    truncate: leave the oldest out where there is no room for them. key: how to know it again. client: who asks; all
    clients that wait take turns. domain: what of the store is there for it, and whose a new session is.
    arrived: perf_counter when it came, before it was read; None: as it is submitted. load_ms: it waited for its model.
    id: what its answer is called. given: what the template is told beside the messages. grammar: of the answer.
    tool_choice: of the tools that are given. thinking_budget: tokens after which reasoning is ended.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = int(OPTIONS["max_tokens"].otherwise)
    stop: tuple[str, ...] = ()
    n: int = 1
    session: str | None = None
    store: bool = True
    truncate: bool = False
    key: ReplyKey | None = None
    client: str = ""
    domain: Domain = EVERYBODY
    arrived: float | None = None
    load_ms: float = 0.0
    given: Given = NOTHING_MORE
    grammar: Grammar | None = None
    raw: Raw | None = None
    more: tuple[Raw, ...] = ()
    echo: bool = False
    tool_choice: ToolChoice = AUTO
    thinking_budget: int | None = None
    id: str = field(default_factory=lambda: f"gen_{secrets.token_hex(12)}", compare=False)

    @property
    def choices(self) -> int:
        """How many answers are asked for, of all its prompts."""
        return self.n * (1 + len(self.more))


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token. `top` lists (token text, its bytes, logprob), most likely first."""

    token: str
    utf8: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True)
class CallDelta:
    """More of a tool call. number: its place among the answer's calls, from 0. id, name: in its first delta, else "".
    arguments: more of their JSON text.
    """

    number: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """New text of choice `index`. Never a half character, never a part of a stop string.

    reasoning: it is thought, not said. call: it is more of a tool call, and `text` is "".
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: bool = False
    call: CallDelta | None = None


@dataclass(frozen=True)
class Usage:
    """Counted, not computed: `cached_tokens` are those that were not fed again. Times in milliseconds.

    ttft_ms: from when the request was there, and the sum of what follows it here: load_ms, its model was loaded;
    plan_ms, it was read, rendered, tokenised and looked up; queue_ms, it waited for a lane; restore_ms; prefill_ms, its
    prompt was fed; shared_ms, others' steps were computed meanwhile, and the first token was drawn.
    stored: the text of all choices is. state_stored: the state at the end of each is too. context_left: tokens that the
    conversation has room for after the longest answer, None if it is not bounded.
    cut_messages: those that were left out for want of room. stopped: it was ended before its end.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    session: str | None
    resume: Resume
    stored: bool
    ttft_ms: float
    tbt_ms: float | None
    prefill_ms: float
    restore_ms: float
    context_left: int | None = None
    cut_messages: int = 0
    load_ms: float = 0.0
    plan_ms: float = 0.0
    queue_ms: float = 0.0
    shared_ms: float = 0.0
    stopped: bool = False
    state_stored: bool = False

    @staticmethod
    def of_nothing(session: str | None, load_ms: float) -> Usage:
        """What a request took that was stopped before it was planned."""
        return Usage(0, 0, 0, session, "none", False, 0.0, None, 0.0, 0.0, load_ms=load_ms, stopped=True)


@dataclass(frozen=True)
class Done:
    """The last event of a request that ran: it comes after the turn was committed (or `usage.stored` is false)."""

    finish_reasons: tuple[FinishReason, ...]
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """The last event of a request that broke off; what was sent is stored, marked incomplete."""

    error: Rejected


@dataclass(frozen=True)
class Recalled:
    """The engine gives a request back that it has not begun: its model makes room for another one. Who asked may ask
    again; nothing comes after it."""


Event = Delta | Done | Failed | Recalled


def label(generation: str, key: str) -> str:
    """What the log calls a request: its generation's id, and the name of the key that it came with, if that has one."""
    return f"{generation} of {key}" if key else generation


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same in as few deltas as tell it, in one choice's order; without log-probabilities."""
    found = []
    for _, alike in groupby(deltas, key=_kind):
        first, *more = alike
        if first.call is None:
            text = "".join(delta.text for delta in (first, *more))
            if text:
                found.append(Delta(first.index, text, reasoning=first.reasoning))
            continue
        arguments = "".join(delta.call.arguments for delta in (first, *more) if delta.call is not None)
        call = CallDelta(first.call.number, first.call.id, first.call.name, arguments)
        found.append(Delta(first.index, "", call=call))
    return found


def calls_of(deltas: Sequence[Delta]) -> tuple[ToolCall, ...]:
    """The calls that deltas of one choice tell of, each as far as it came."""
    calls: list[tuple[CallDelta, list[str]]] = []
    for delta in deltas:
        if delta.call is not None:
            if delta.call.name:
                calls.append((delta.call, []))
            calls[-1][1].append(delta.call.arguments)
    return tuple(ToolCall(call.id, call.name, "".join(arguments)) for call, arguments in calls)


def _kind(delta: Delta) -> tuple[bool, int, bool]:
    """What joins with its like: a call begins alone, and its arguments follow."""
    call = delta.call
    return delta.reasoning, -1 if call is None else call.number, call is not None and bool(call.name)
