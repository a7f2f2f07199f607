"""One of the n choices of a request while it decodes: from a row of logits to the deltas to send, and to tool calls."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

from ssmd.engine.prompt.planner import Prompt
from ssmd.engine.request import CallDelta, Delta, FinishReason, Request, TokenLogprob, turn_of
from ssmd.engine.sampling.bounds import check_size, enforced
from ssmd.engine.sampling.grammar import Guide
from ssmd.engine.sampling.sampler import Sample, Sampler
from ssmd.engine.terms import Grammar, Rejection
from ssmd.runtime.protocol import Handle, Logits
from ssmd.text.answer import AnswerReader
from ssmd.text.calls.forced import forced
from ssmd.text.calls.formats import Format, format_of
from ssmd.text.calls.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from ssmd.text.messages import THINK, THINK_END, ToolCall
from ssmd.text.schemas import UnsupportedSchema
from ssmd.text.stops import StopStrings
from ssmd.text.tokenizer import Detokenizer, Tokenizer

End = FinishReason | Literal["cancelled"]
_AT_THE_END = 64  # characters at a prompt's end in which its marker of reasoning stands
_FREE = "free"  # name of the grammar of an answer without calls


class Choice:
    """Turns logits into tokens, and tokens into deltas, for choice `index`. In the worker, before a token is fed."""

    def __init__(
        self,
        request: Request,
        index: int,
        budget: int,
        tokenizer: Tokenizer,
        stops: frozenset[int],
        prompt: Prompt,
        calling: ToolCalling,
        guide: Guide | None = None,
    ) -> None:
        """Begin a choice.

        prompt: its ids at hand include all that a penalty counts. guide: the choice's own copy.
        """
        self.index = index
        # With facts of its own, a turn is found by the answer's id.
        self.turn = turn_of(request.id) if request.facts is not None else f"turn_{secrets.token_hex(12)}"
        self.handle: Handle = None
        # Tokens of the text. The last one and those that a grammar forces may not be fed yet.
        self.tokens: list[int] = []
        self.ahead = 0  # tokens to feed after the next one
        self.waited = 0  # steps of others that forced tokens have waited for a prefill
        self.deltas: list[Delta] = []  # all that were sent
        self.end: End | None = None
        self.cut = False  # text and tokens disagree: a stop string, or a control token inside the answer
        self.times: list[float] = []  # perf_counter at each sampled token
        self.reasoning_tokens = 0
        self._request = request
        self._budget = budget
        dry = request.sampling.dry
        breakers = () if dry is None else tokenizer.holding(dry.breakers)
        before, padding = prompt.ids.own, tokenizer.padding
        self._sampler = Sampler(request.sampling, index=index, before=before, breakers=breakers, padding=padding)
        self._tokenizer = tokenizer
        self._stop_tokens = stops
        # The guide of each call, from its marker to its end, or else of the whole answer.
        self._of_calls = guide if request.grammar is not None and request.grammar.begun else None
        self._guide = guide if self._of_calls is None else None
        self._detokenizer = Detokenizer(tokenizer, begun=request.raw is not None)
        self._stop_strings = StopStrings(request.stop) if request.stop else None
        self._calling = calling
        self._reader = calling.reader(request, prompt)
        self._read: list[tuple[str, bool]] = []  # texts; True if the text is a marker that came as a control token
        self._held: list[TokenLogprob] = []  # log-probabilities of tokens whose text is held back
        self._spoke = True  # before this token
        self._thought = 0  # tokens of reasoning
        self._bound: deque[int] = deque()  # tokens that come next, regardless of the logits
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, arguments
        self._end_thinking(0)

    def take(self, logits: Logits) -> Sequence[Delta]:
        """Sample from `logits` [vocab] and return the deltas to send. Sets `end` when this choice is over."""
        # The grammar applies after the reasoning. A forced tool call's grammar covers both.
        thinks = self._reader.thinks
        waits = thinks and self._request.tool_choice.mode != "required"
        guide = None if waits else self._guide
        mask = None if guide is None else guide.mask()
        # No penalty under a grammar or in a call: JSON repeats its keys, and a call copies names.
        penalized = guide is None and not self._reader.in_call
        sample = self._bound_sample() if self._bound else self._sampler.sample(logits, mask, penalized=penalized)
        self.times.append(time.perf_counter())
        if sample.token in self._stop_tokens:
            return self._finish("stop")
        self.reasoning_tokens += thinks
        if sample.logprob is not None:
            self._held.append(self._logprob(sample, sample.logprob))
        parts, hit = self._say(sample.token)
        if guide is not None and not hit:
            more, hit = self._follow(guide, sample.token)
            parts = [*parts, *more]
        self._end_thinking()
        if hit:
            return self._cut_off(parts)
        self._follow_calls()
        if (guide is not None and guide.ended and self._of_calls is None) or (
            self._reader.calls_over and self._one_call
        ):
            return self._finish("stop", parts)
        if len(self.tokens) >= self._budget:
            return self._finish("length", parts)
        return self._deltas(parts)

    def fed(self, count: int) -> bool:
        """Note that `count` tokens of `unfed` were fed. Return True if the logits after them are for `take`."""
        rest = self.ahead + 1 - count
        self.ahead = max(0, rest - 1)
        return rest == 0

    def cancel(self) -> None:
        """End the choice with what was sent. Sets `cut` if text of its tokens is held back."""
        if self.end is None:
            self.end = "cancelled"
            self.cut = self.cut or bool(self._held_back()[0]) or self._reader.holds

    @property
    def next_token(self) -> int:
        return self.tokens[-1 - self.ahead]

    @property
    def unfed(self) -> list[int]:
        """Return the tokens to feed before the next draw: more than one if a grammar forced some."""
        return self.tokens[-1 - self.ahead :]

    @property
    def text(self) -> str:
        """Return the text that was sent, without calls. Reasoning is included as it was written."""
        return self._reader.content

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that ended this choice, if one did."""
        return None if self._stop_strings is None else self._stop_strings.found

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls that were sent, each as far as it came."""
        return tuple(ToolCall(id_, name, "".join(arguments)) for id_, name, arguments in self._calls)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Return the log-probabilities that were sent."""
        return [entry for delta in self.deltas for entry in delta.logprobs]

    @property
    def rendered(self) -> str:
        """Return the text of the tokens, escaped as a template would write it. Not valid if the choice is `cut`."""
        parts = []
        for marks, texts in groupby(self._read, key=lambda read: read[1]):
            text = "".join(text for text, _ in texts)
            parts.append(text if marks else self._tokenizer.escape(text))
        return "".join(parts)

    @property
    def _one_call(self) -> bool:
        return not self._request.tool_choice.parallel or self._request.tool_choice.name is not None

    def _bound_sample(self) -> Sample:
        token = self._bound.popleft()
        self._sampler.skip(token)
        return Sample(token, None, ())

    def _end_thinking(self, tokens: int = 1) -> None:
        """End the reasoning when its budget is spent. tokens: new ones since the last call."""
        budget = self._request.thinking_budget
        if budget is None or not self._reader.thinks or self._thought > budget:
            return
        self._thought += tokens
        if self._thought >= budget:
            self._bound.extend(self._calling.think_end)
            self._thought = budget + 1

    def _say(self, token: int) -> tuple[list[Part], bool]:
        """Add a token. Return the parts to send, and True if it completes a stop string."""
        self.tokens.append(token)
        if not self._tokenizer.is_control(token):
            text, hit = self._scan(self._detokenizer.push(token))
            return self._push(text), hit
        marker = self._tokenizer.token_text(token)
        if marker in self._calling.controls:
            text, hit = self._held_back()  # no stop string reaches over a marker
            parts = self._push(text)
            if hit:
                return parts, True
            more = self._reader.mark(marker)
            if more is not None:
                self._read.append((marker, True))
                return [*parts, *more], False
            self.cut = True
            return parts, False
        self.cut = True
        return [], False

    def _follow(self, guide: Guide, token: int) -> tuple[list[Part], bool]:
        """Add the tokens that a grammar forces after `token`. Returns the same as `_say`.

        None are added if log-probabilities are requested: only drawn tokens have them.
        """
        room = 0 if self._sampler.params.logprobs else self._budget - len(self.tokens)
        parts: list[Part] = []
        for given in guide.take(token, room):
            self._sampler.skip(given)
            self.times.append(self.times[-1])
            more, hit = self._say(given)
            parts += more
            if hit:
                return parts, True
            self.ahead += 1
        return parts, False

    def _follow_calls(self) -> None:
        """Apply the grammar of calls from the beginning of a call to its end."""
        if self._of_calls is None:
            return
        if self._guide is not None and self._guide.ended:
            self._guide = None
        if self._guide is None and (begun := self._reader.begun) is not None:
            self._guide = self._of_calls.behind(begun)

    def _push(self, text: str) -> list[Part]:
        if not text:
            return []
        self._read.append((text, False))
        return self._reader.push(text)

    def _finish(self, end: FinishReason, parts: Sequence[Part] = ()) -> Sequence[Delta]:
        rest, hit = self._held_back()
        told = [*parts, *self._push(rest)]
        if hit:
            return self._cut_off(told)
        told += self._end_reading(end == "length")
        called = end == "stop" and self._reader.called and self._request.tool_choice.name is None
        self.end = "tool_calls" if called else end
        return self._deltas(told)

    def _cut_off(self, parts: Sequence[Part]) -> Sequence[Delta]:
        told = [*parts, *self._end_reading(True)]
        self.end, self.cut = "tool_calls" if self._reader.called else "stop", True
        self._held.clear()  # of tokens that reach into the stop string
        return self._deltas(told)

    def _end_reading(self, early: bool) -> list[Part]:
        """Return the parts that were held back.

        early: the answer did not come to its end. The beginning of a call is then dropped if the grammar required the
        call.
        """
        bound = self._request.tool_choice.mode == "required" if self._of_calls is None else self._guide is not None
        if not (early and bound):
            return self._reader.end(cut=early)
        self.cut = self.cut or (self._reader.holds and not self._reader.calling)
        return self._reader.end(in_call=True, cut=True)

    def _held_back(self) -> tuple[str, bool]:
        """Return the text not sent yet, and True if a stop string cuts it."""
        text, hit = self._scan(self._detokenizer.flush())
        if not hit and self._stop_strings is not None:
            text += self._stop_strings.flush()
        return text, hit

    def _scan(self, text: str) -> tuple[str, bool]:
        return (text, False) if self._stop_strings is None else self._stop_strings.push(text)

    def _deltas(self, parts: Sequence[Part]) -> Sequence[Delta]:
        """Turn parts into deltas. Log-probabilities go with the text; those of other tokens are dropped."""
        deltas = [delta for part in parts if (delta := self._delta(part)) is not None]
        spoke, self._spoke = self._spoke, self._reader.speaks
        if not (spoke and self._spoke):  # for example, at a marker's last token
            self._held.clear()
        if self._held and self.end and not self._reader.calls_over:
            deltas.append(Delta(self.index, "", self._logprobs()))
        self.deltas += deltas
        return deltas

    def _delta(self, part: Part) -> Delta | None:
        if isinstance(part, TextPart):
            return Delta(self.index, part.text, self._logprobs())
        self._held.clear()
        if isinstance(part, ReasoningPart):
            return Delta(self.index, part.text, reasoning=True)
        if isinstance(part, CallStart):
            call = CallDelta(len(self._calls), self._calling.format.new_id(), part.name)
            self._calls.append((call.id, call.name, []))
            return Delta(self.index, "", call=call)
        if isinstance(part, CallArguments):
            self._calls[-1][2].append(part.text)
            return Delta(self.index, "", call=CallDelta(len(self._calls) - 1, arguments=part.text))
        return None

    def _logprobs(self) -> tuple[TokenLogprob, ...]:
        held, self._held = tuple(self._held), []
        return held

    def _logprob(self, sample: Sample, logprob: float) -> TokenLogprob:
        name, utf8 = self._tokenizer.token_text, self._tokenizer.token_bytes
        top = tuple((name(t), utf8(t), p) for t, p in sample.top)
        return TokenLogprob(name(sample.token), utf8(sample.token), logprob, top)


class ToolCalling:
    """Reads the answers of a model whose chat template has this source. Thread-safe."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.format = format_of(source)
        self._reasons = THINK in source
        self._tokenizer = tokenizer
        # Both are made here: the worker must not wait for a tokenizer in another process, which may have ended too.
        self.controls = self._controls()  # markers that are control tokens of this model, and their ids
        self.think_end = tokenizer.encode(f"\n{THINK_END}\n\n")  # tokens that end reasoning, as models write its end

    def _controls(self) -> Mapping[str, int]:
        known = self._tokenizer
        ids = ((m, t) for m in (*self.format.markers, THINK, THINK_END) for t in known.encode(m) if known.is_control(t))
        return {marker: token for marker, token in ids if known.token_text(token) == marker}

    def reader(self, request: Request, prompt: Prompt) -> AnswerReader:
        """Return a reader for one answer. It looks for calls if the request has tools that may be called."""
        calls = self.format if request.given.tools and request.tool_choice.mode != "none" else None
        tools = {} if calls is None else schemas_of(request.given.tools)
        raw = request.raw is not None  # a client that writes the raw prompt also parses the answer
        begun, thinking = raw or bool(prompt.begun.strip()), not raw and _thinks(prompt)
        return AnswerReader(calls, tools, thinking=thinking, begun=begun, controls=self.controls)

    def forced(self, request: Request, prompt: Prompt) -> Request:
        """Return the request with the grammar that its tools need. Raises Rejection if it does not support an argument.

        If a call is required, its grammar replaces the request's own.
        If a call is optional, the answer follows the request's own grammar or calls a tool.
        If it has no grammar of its own, only the calls follow one, and only if there are `strict` tools.
        """
        choice, free = request.tool_choice, request.grammar
        if choice.mode == "none" or not request.given.tools:
            return request
        tools, parts = _bound(request, self.format)
        if choice.mode == "auto" and free is not None:
            text = forced(self.format, tools, several=True, thought=None, controls=self.controls, free=_FREE)
            either = Grammar(_either(text, free), free.param, (free, *parts), numbers=free.numbers)
            return replace(request, grammar=either)
        if choice.mode == "auto" and not parts:
            return request
        if choice.mode == "auto":
            text = forced(self.format, tools, several=True, thought=None, controls=self.controls, begun=True)
            return replace(request, grammar=Grammar(text, "tools", parts, begun=True, numbers=True))
        thought = "" if _thinks(prompt) else THINK if self._reasons and not prompt.begun.strip() else None
        text = forced(self.format, tools, several=choice.parallel, thought=thought, controls=self.controls)
        return replace(request, grammar=Grammar(text, "tools", parts, numbers=True))


def _bound(request: Request, format_: Format) -> tuple[list[Mapping[str, Any]], tuple[Grammar, ...]]:
    """Return the tools that may be called, and the grammars of their arguments. Raises Rejection.

    If no call is required, a tool that is not `strict` takes any arguments.
    """
    choice, tools, parts = request.tool_choice, list[Mapping[str, Any]](), list[Grammar]()
    for i, tool in enumerate(request.given.tools):
        function, param = tool["function"], f"tools[{i}].function.parameters"
        if choice.name is not None and function["name"] != choice.name:
            continue
        if not choice.binds(function):
            tools.append({"function": {"name": function["name"], "parameters": {"type": "object"}}})
            continue
        schema = function.get("parameters") or {}
        kinds = schema.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            said = f"{param}.type is not object, which the arguments of a call are"
            raise Rejection(said, code="unsupported_schema", param=f"{param}.type")
        found = enforced({**schema, "type": "object"}, param).schema
        check_size(found, param)
        tools.append({"function": {"name": function["name"], "parameters": schema and found}})
        text = json.dumps({"grammars": [{"json_schema": found}]}, ensure_ascii=False)
        parts.append(Grammar(text, param))
        if format_.tagged:  # its cost does not follow from the schema's, so it is no plain grammar
            try:
                text = forced(format_, tools[-1:], several=False, thought=None, controls={})
            except UnsupportedSchema as err:
                said = f"{param}{err.way} {err.why}"
                raise Rejection(said, code="unsupported_schema", param=param + err.way) from None
            parts.append(Grammar(text, param))
    return tools, tuple(parts)


def _either(calls: str, free: Grammar) -> str:
    """Combine the grammar of calls with `free`, which it refers to by name."""
    inner = json.loads(free.text)["grammars"] if free.text.startswith("{") else [{"lark_grammar": free.text}]
    grammars = [{"lark_grammar": calls}, {**inner[0], "name": _FREE}, *inner[1:]]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def schemas_of(tools: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    """Return the parameters' schema of each function among these tools, by its name."""
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    return {str(function["name"]): function.get("parameters") for function in functions}


def _thinks(prompt: Prompt) -> bool:
    """Return True if a prompt ends inside reasoning, begun by its template or by a text that is continued."""
    begun = prompt.begun.lstrip()
    if begun:
        return begun.startswith(THINK) and THINK_END not in begun
    return prompt.text.own[-_AT_THE_END:].rstrip().endswith(THINK)
