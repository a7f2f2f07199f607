"""Chat templates: from messages to the text format that a model was trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

import jinja2
from jinja2 import meta

from ssmd.model.artifact import SpecialTokens
from ssmd.text.arguments import read_arguments
from ssmd.text.jinja.appending import AppendingSandbox, Flow, MessageTail
from ssmd.text.jinja.meter import MAX_DEPTH, Meter
from ssmd.text.jinja.sandbox import Sandbox, TemplateFunction
from ssmd.text.messages import Message

MAX_SOURCE = 128 << 10  # characters of a template's source; the longest in use have about 30,000
MAX_DATE_FORMAT = 100  # characters of a date format that a template passes to strftime_now
# Marks the end of a message that is to be continued. If a space after it is gone, the template trims.
_HERE = "\U0010fff8here\U0010fff8"
# A width before a directive ("%999999999d"). The C library would write that many characters.
_DATE_WIDTH = re.compile(r"(?<!%)(?:%%)*%[^A-Za-z%]*\d")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # clients' names for it; templates read the first
OWN = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")

_sandbox = Sandbox()
_appending = AppendingSandbox()


class TemplateError(ValueError):
    """A template that cannot be read, or that refuses these messages; then the text is the template's own."""


@dataclass(frozen=True)
class StablePrefix:
    """The beginning of a message in a text. Messages from there on cannot change the text before it.

    messages: messages of the whole conversation before it. characters: length of the text before it.
    """

    messages: int
    characters: int


@dataclass(frozen=True)
class RenderedText:
    """A rendered text. settled: the last message before which the text is settled; None if no part is known to be."""

    text: str
    settled: StablePrefix | None


@dataclass(frozen=True, eq=False)
class TemplateInput:
    """A template's input beside the messages, all JSON. Two are equal if their JSON text is equal.

    tools: as in OpenAI's API, `{"type": "function", …}` each. variables: more names, such as enable_thinking.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """Both as JSON. The order of names is kept, as templates write them in this order."""
        return json.dumps([self.tools, self.variables])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TemplateInput) and (self is other or self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)


NOTHING_MORE = TemplateInput()


class Template(Protocol):
    """A renderer of conversations: a ChatTemplate, in this process or in a child (apart.py)."""

    source: str

    @property
    def variables(self) -> frozenset[str]:
        """Return the names that the template looks up, as ChatTemplate.variables. Raises TemplateError."""

    def render(
        self, messages: Sequence[Message], *, now: datetime, generate: bool = True, given: TemplateInput = NOTHING_MORE
    ) -> str:
        """Render, as ChatTemplate.render does."""

    def render_settled(
        self, messages: Sequence[Message], *, now: datetime, given: TemplateInput = NOTHING_MORE
    ) -> RenderedText:
        """Render, and return which part is settled, as ChatTemplate.render_settled does."""

    def render_after(
        self,
        first: Message,
        skipped: int,
        tail: Sequence[Message],
        *,
        now: datetime,
        given: TemplateInput = NOTHING_MORE,
    ) -> RenderedText | None:
        """Render from a message on, as ChatTemplate.render_after does. Raises TemplateError if the child ends."""


class ChatTemplate:
    """A compiled chat template. Rendering the same messages at the same `now` gives the same text. Thread-safe."""

    def __init__(self, source: str, special: SpecialTokens) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters, at most {MAX_SOURCE} are allowed")
        try:
            self._template = _sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise TemplateError(f"chat template, line {err.lineno}: {err.message}") from err
        except Exception as err:  # of Python's own compiler, for nested or odd source
            raise TemplateError(f"the chat template cannot be compiled: {str(err) or type(err).__name__}") from err
        self.source = source
        self._special = {f"{name}_token": text for name, text in special.model_dump().items() if text is not None}

    def render(
        self, messages: Sequence[Message], *, now: datetime, generate: bool = True, given: TemplateInput = NOTHING_MORE
    ) -> str:
        """Return the text for `messages`, with the generation prompt if `generate`.

        If `generate` and the last message is the assistant's, it is continued: the text ends right after its content.
        now: the time that the template gets. Raises TemplateError.
        """
        if not generate or not messages or messages[-1].role != "assistant":
            return self._whole([_shown(m) for m in messages], now, generate, given)
        text = self._whole(_marked(messages), now, False, given)
        return _begun(text, messages[-1].content)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Return the names that the template looks up. Other variables change nothing. Raises TemplateError."""
        try:
            return frozenset(meta.find_undeclared_variables(_sandbox.parse(self.source)))
        except Exception as err:  # source that nests too deep for Jinja's recursive functions
            raise TemplateError(f"the chat template's variables are not known: {type(err).__name__}") from err

    def _whole(self, shown: Sequence[Mapping[str, Any]], now: datetime, generate: bool, given: TemplateInput) -> str:
        tools, variables = given.tools or None, given.variables
        return self.render_json(shown, now=now, generate=generate, tools=tools, variables=variables)

    def render_settled(
        self, messages: Sequence[Message], *, now: datetime, given: TemplateInput = NOTHING_MORE
    ) -> RenderedText:
        """Return the text of `render`, and the part of it that later messages cannot change. Raises TemplateError."""
        done = self._append(messages[0], 0, messages, now, given) if len(messages) > 1 else None
        return done or RenderedText(self.render(messages, now=now, given=given), None)

    def render_after(
        self,
        first: Message,
        skipped: int,
        tail: Sequence[Message],
        *,
        now: datetime,
        given: TemplateInput = NOTHING_MORE,
    ) -> RenderedText | None:
        """Return the end of `render`'s text, from message `skipped` on, without rendering the messages before it.

        first: the conversation's first message. tail: its messages from number `skipped` on. The messages before,
        `now` and `given` must be those of a rendering that was settled there. The result's `settled` counts characters
        from the beginning of this text. Returns None if the template is not known to allow this, or refuses: the
        whole conversation must then be rendered.
        """
        return self._append(first, skipped, tail, now, given)

    def _append(
        self, first: Message, skipped: int, tail: Sequence[Message], now: datetime, given: TemplateInput
    ) -> RenderedText | None:
        template = self._appended
        if template is None:
            return None
        last, generate = tail[-1], tail[-1].role != "assistant"
        shown = [_shown(m) for m in tail] if generate else _marked(tail)
        beside = {"tools": list(given.tools) or None, "documents": None, **self._named(given.variables)}
        meter = Meter(_characters(shown) + len(first.content) + _characters(beside), len(shown))
        flow = Flow(shown[0] if not skipped else _shown(first), skipped, shown, meter)
        _appending.flow = flow
        try:
            whole = _run(_appending, template, {"messages": MessageTail(flow), **beside}, _own(now, generate), meter)
            at = flow.begins if skipped and flow.begins is not None else 0
            text = whole[at:] if generate else _begun(whole[at:], last.content)
        except TemplateError:
            return None
        finally:
            _appending.flow = None
        # If an answer is continued, the text cut off after it may have begun before the returned text.
        if flow.refused or flow.begins is None or not (generate or text.strip()):
            return None
        if flow.settled is None or flow.settled[1] - at > len(text):
            return RenderedText(text, None)
        return RenderedText(text, StablePrefix(flow.settled[0], flow.settled[1] - at))

    @cached_property
    def _appended(self) -> jinja2.Template | None:
        """The template compiled for texts that only grow; None if its text is not known to do so."""
        try:
            return _appending.from_string(self.source)
        except Exception:  # AppendError, or an error of Python's compiler, as this source nests a little deeper
            return None

    def render_json(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        now: datetime,
        generate: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages given as JSON: with tool calls and their results, content in parts, reasoning.

        The text is that of transformers' `apply_chat_template`. A message's null fields are left out. variables: more
        names for the template, such as enable_thinking. No message is continued. Raises TemplateError, also if a given
        value is not JSON.
        """
        more = self._named(variables or {})
        shown = [_named({k: v for k, v in message.items() if v is not None}) for message in messages]
        given = {"messages": shown, "tools": tools, "documents": documents, **more}
        return _run(_sandbox, self._template, given, _own(now, generate), Meter(_characters(given), len(messages)))

    def _named(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables and the special tokens by name. Raises TemplateError."""
        if taken := [name for name in OWN if name in variables]:
            raise TemplateError(f"{taken[0]} cannot be given as a variable: the chat template has its own")
        return {**self._special, **variables}


def _own(now: datetime, generate: bool) -> dict[str, Any]:
    """Return the template's input that does not come from the request."""
    return {"add_generation_prompt": generate, "strftime_now": TemplateFunction(lambda pattern: _date(now, pattern))}


def _run(sandbox: Sandbox, template: jinja2.Template, given: dict[str, Any], own: dict[str, Any], meter: Meter) -> str:
    """Run a template and return its text. Raises TemplateError."""
    sandbox.meter = meter
    parts: list[str] = []
    try:
        for part in template.generate({**given, **own}):
            meter.wrote(len(part))
            parts.append(part)
        return "".join(parts)  # fails if the template puts out anything but texts
    except jinja2.TemplateError as err:
        raise TemplateError(err.message or type(err).__name__) from err
    except Exception as err:  # a template can raise any error
        raise TemplateError(f"the chat template failed: {str(err) or type(err).__name__}") from err
    finally:
        sandbox.meter = None


def _marked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose last one, the assistant's, is to be continued: a mark follows its content."""
    *before, last = messages
    return [*map(_shown, before), {**_shown(last), "content": f"{last.content}{_HERE} "}]


def _shown(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: arguments of calls are objects."""
    fields = message.to_json()
    for call in fields.get("tool_calls", ()):
        arguments = read_arguments(call["function"]["arguments"])
        if arguments is not None:
            call["function"]["arguments"] = arguments
    return fields


def _begun(text: str, content: str) -> str:
    """Return a text up to its mark, which must follow `content`. Raises TemplateError."""
    at = text.rfind(_HERE)
    if at < 0:
        raise TemplateError("the chat template drops the assistant's last message, so it cannot be continued")
    trims = not text.startswith(f"{_HERE} ", at)
    text = text[:at].rstrip() if trims else text[:at]
    if not text.rstrip().endswith(content.strip()):
        raise TemplateError("the chat template changes the assistant's last message, so it cannot be continued")
    return text


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning, if it has any, under the names that templates read."""
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _characters(value: Any, depth: int = 0) -> int:
    """Count the characters of all texts in a JSON value. Raises TemplateError if it is not JSON or nests too deep."""
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, (bool, int, float)):
        return 0
    if depth > MAX_DEPTH:
        raise TemplateError(f"what the chat template is given nests more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        total = 0
        for k, v in value.items():
            total += len(k) if type(k) is str else _characters(k)
            total += len(v) if type(v) is str else _characters(v, depth + 1)
        return total
    if isinstance(value, (list, tuple)):
        return sum(_characters(v, depth + 1) for v in value)
    raise TemplateError(f"the chat template is given a {type(value).__name__}, which is not JSON")


def _date(now: datetime, pattern: Any) -> str:
    if not isinstance(pattern, str) or len(pattern) > MAX_DATE_FORMAT or _DATE_WIDTH.search(pattern):
        raise TemplateError(f"strftime_now: the format {str(pattern)[:MAX_DATE_FORMAT]!r} is not allowed")
    return now.strftime(pattern)
