"""Reading of one model's answers, and the grammars of answers that call tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ssmd.engine.prompt.planner import Prompt
from ssmd.engine.request import Request
from ssmd.engine.sampling.bounds import check_size, enforced
from ssmd.engine.terms import Grammar, Rejection
from ssmd.text.answer import AnswerReader
from ssmd.text.calls.forced import forced
from ssmd.text.calls.formats import Format, format_of
from ssmd.text.messages import THINK, THINK_END
from ssmd.text.schemas import UnsupportedSchema
from ssmd.text.tokenizer import Tokenizer

_AT_THE_END = 64  # characters at a prompt's end in which its marker of reasoning stands
_FREE = "free"  # name of the grammar of an answer without calls


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
