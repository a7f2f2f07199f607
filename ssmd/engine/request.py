"""The vocabulary between engine and API: a request to the engine, and the events that it returns."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.terms import Grammar, Rejection
from ssmd.model.defaults import OPTIONS
from ssmd.sessions.remote.remote import RemoteState
from ssmd.sessions.reply import ReplyKey
from ssmd.sessions.turn import EVERYBODY, Domain
from ssmd.text.calls.tool_choice import AUTO, ToolChoice
from ssmd.text.messages import BlockEnd, Message, ToolCall
from ssmd.text.template import NOTHING_MORE, TemplateInput

Resume = Literal["exact", "portable", "none"]
FinishReason = Literal["stop", "length", "tool_calls"]
Retention = Literal["24h", "in_memory", "none"]  # of states without a session: their life after the last use
Raw = str | tuple[int, ...]  # a prompt without a template
_GENERATION = "gen_"
LEAST_LOGPROB = -9999.0  # logprob of an impossible token, as OpenAI writes it: JSON has no -Infinity


@dataclass(frozen=True)
class Beginning:
    """A beginning of prompts that is to be read once and kept pinned. The request's answer is not stored.

    name: title of its session. idle: read it when no request waits; the request ends at once. session: take the tools
    and system messages of this stored conversation; None: those of the request. owner: of the states, if the request's
    domain is everybody's; None: the domain's, or the stored conversation's.
    """

    name: str
    idle: bool = False
    session: str | None = None
    owner: str | None = None


@dataclass(frozen=True)
class Request:
    """A client's request. `messages` is always the whole conversation."""

    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = int(OPTIONS["max_tokens"].otherwise)  # per choice
    stop: tuple[str, ...] = ()
    n: int = 1
    session: str | None = None
    store: bool = True
    retention: Retention | None = None  # of its states if it is not stored; None: the setting
    truncate: bool = False  # drop the oldest messages if there is no room for them
    key: ReplyKey | None = None  # recognises a repetition of this request
    client: str = ""  # all clients that wait take turns
    model: str = ""  # the id of the model that it is for, to be named in its usage
    domain: Domain = EVERYBODY  # rows of the store that it can read, and the owner of its new session
    arrived: float | None = None  # perf_counter when it came, before it was read; None: when it is submitted
    load_ms: float = 0.0  # time that it waited for its model
    given: TemplateInput = NOTHING_MORE  # input of the template beside the messages
    blocks: tuple[BlockEnd, ...] = ()  # within system prompts and users' messages, and of marked blocks, in order
    marked_tools: int = 0  # tools up to the last one that is marked; 0: none is
    grammar: Grammar | None = None  # of the answer
    raw: Raw | None = None  # the prompt as it is, text or ids, in place of messages
    warm: Beginning | None = None  # read this, in place of an answer
    more: tuple[Raw, ...] = ()  # further raw prompts; their choices are numbered after those of the first
    echo: bool = False  # each choice begins with its prompt
    tool_choice: ToolChoice = AUTO  # among the tools in `given`
    facts: Mapping[str, Any] | None = None  # JSON to keep with its turn; only for one choice
    conversation: str | None = None  # the stored conversation that its turn is added to
    created: int | None = None  # s since 1970 when it was accepted; None: when its prompt is planned
    thinking_budget: int | None = None  # tokens after which reasoning is ended
    id: str = field(default_factory=lambda: f"{_GENERATION}{secrets.token_hex(12)}", compare=False)  # of its answer

    @property
    def choices(self) -> int:
        """Count the requested choices, over all prompts."""
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
    """More of a tool call. arguments: more of their JSON text.

    number: index among the answer's calls, from 0. id, name: in the call's first delta, else "".
    """

    number: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """New text of choice `index`. Never a half character, never a part of a stop string.

    reasoning: the text is reasoning. call: more of a tool call; then `text` is "".
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: bool = False
    call: CallDelta | None = None


@dataclass(frozen=True)
class Usage:
    """Usage of a request. Tokens are counted, not computed. Times are in ms.

    ttft_ms is the time from the request's arrival to its first token. It is the sum of load_ms, plan_ms, queue_ms,
    restore_ms, prefill_ms and shared_ms.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that were not fed again
    session: str | None
    resume: Resume
    stored: bool  # the text of all choices is stored
    ttft_ms: float
    tbt_ms: float | None
    prefill_ms: float  # the prompt was fed
    restore_ms: float
    context_left: int | None = None  # tokens of room after the longest answer; None if the context is unbounded
    cut_messages: int = 0  # messages that were left out because the context has no room
    load_ms: float = 0.0  # its model was loaded
    plan_ms: float = 0.0  # it was read, rendered, tokenized and looked up
    queue_ms: float = 0.0  # it waited for a lane
    shared_ms: float = 0.0  # others' steps were computed meanwhile, and the first token was drawn
    stopped: bool = False  # it was stopped before its end
    state_stored: bool = False  # the state at the end of each choice is stored too
    parted_at: int | None = None  # as in GenerationStore
    saved_tokens: int = 0  # prompt tokens that were fed and whose state is kept for later requests
    reasoning_tokens: int = 0  # of the completion's, those drawn while the model reasoned
    stop_strings: Sequence[str | None] = ()  # the one that ended each choice; empty if the request has none
    model: str = ""  # as in the request
    remote: RemoteState | None = None  # if the remote has its turns; None if no remote is set

    @staticmethod
    def of_nothing(session: str | None, load_ms: float, model: str = "") -> Usage:
        """Return the usage of a request that was stopped before it was planned."""
        return Usage(0, 0, 0, session, "none", False, 0.0, None, 0.0, 0.0, load_ms=load_ms, stopped=True, model=model)


@dataclass(frozen=True)
class Finish:
    """The last event of a request that ran. It comes after the turn was committed, or `usage.stored` is false."""

    finish_reasons: tuple[FinishReason, ...]
    usage: Usage


@dataclass(frozen=True)
class Failure:
    """The last event of a request that broke off. The sent text is stored, marked incomplete."""

    error: Rejection


@dataclass(frozen=True)
class Recall:
    """The last event of a request that the engine gives back before it began: its model makes room for another one.

    The caller may submit it again.
    """


Event = Delta | Finish | Failure | Recall


def label(generation: str, key: str) -> str:
    """Return a request's name in the log: its generation's id, and the name of its API key if the key has one."""
    return f"{generation} of {key}" if key else generation


def turn_of(generation: str) -> str:
    """Return the id of the turn that an answer with facts is stored as. generation: the answer's id."""
    return f"turn_{generation.removeprefix(_GENERATION)}"


def generation_of(turn: str) -> str:
    """Return the id of the answer that is stored as this turn."""
    return f"{_GENERATION}{turn.partition('_')[2]}"


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the deltas of one choice, merged into as few as possible, in order. Log-probabilities are dropped."""
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
    """Return the tool calls in the deltas of one choice, each as far as it came."""
    calls: list[tuple[CallDelta, list[str]]] = []
    for delta in deltas:
        if delta.call is not None:
            if delta.call.name:
                calls.append((delta.call, []))
            calls[-1][1].append(delta.call.arguments)
    return tuple(ToolCall(call.id, call.name, "".join(arguments)) for call, arguments in calls)


def _kind(delta: Delta) -> tuple[bool, int, bool]:
    """Return the key by which deltas merge. A call's first delta stands alone; its arguments follow."""
    call = delta.call
    return delta.reasoning, -1 if call is None else call.number, call is not None and bool(call.name)
