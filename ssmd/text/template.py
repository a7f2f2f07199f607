"""Chat templates: from messages to the text that a model was trained to see."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from ssmd.model.artifact import SpecialTokens
from ssmd.text.jinja.meter import MAX_DEPTH, Meter
from ssmd.text.jinja.sandbox import Offered, Sandbox
from ssmd.text.messages import Message

MAX_SOURCE = 128 << 10  # characters; the longest in use have about 30,000
MAX_DATE_FORMAT = 100
# Stands behind a message that is to be continued. The space tells whether the template trims.
_HERE = "\U0010fff8here\U0010fff8"
# A width in front of a directive ("%999999999d") would be obeyed by the C library.
_DATE_WIDTH = re.compile(r"(?<!%)(?:%%)*%[^A-Za-z%]*\d")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # what clients call it; the first is what templates read
_OWN = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")

_sandbox = Sandbox()


class TemplateError(ValueError):
    """A template that cannot be read, or that refuses these messages: then the message is the template's own."""


class ChatTemplate:
    """A compiled chat template. Rendering the same messages at the same `now` gives the same text. Thread-safe."""

    def __init__(self, source: str, special: SpecialTokens) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters, at most {MAX_SOURCE} are allowed")
        try:
            self._template = _sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise TemplateError(f"chat template, line {err.lineno}: {err.message}") from err
        except Exception as err:  # what Python's own compiler makes of nested or odd source
            raise TemplateError(f"the chat template cannot be compiled: {err or type(err).__name__}") from err
        self.source = source
        self._special = {f"{name}_token": text for name, text in special.model_dump().items() if text is not None}

    def render(self, messages: Sequence[Message], *, now: datetime, generate: bool = True) -> str:
        """The text for `messages`, with the generation prompt if `generate`.

        If then the last message is the assistant's, it is continued: the text ends right after its content.
        `now` is the clock that the template sees. Raises TemplateError.
        """
        if not generate or not messages or messages[-1].role != "assistant":
            return self.render_json([m.to_json() for m in messages], now=now, generate=generate)
        *before, last = messages
        marked = {**last.to_json(), "content": f"{last.content}{_HERE} "}
        text = self.render_json([*(m.to_json() for m in before), marked], now=now, generate=False)
        at = text.rfind(_HERE)
        if at < 0:
            raise TemplateError("the chat template drops the assistant's last message, so it cannot be continued")
        trims = not text.startswith(f"{_HERE} ", at)
        text = text[:at].rstrip() if trims else text[:at]
        if not text.rstrip().endswith(last.content.strip()):
            raise TemplateError("the chat template changes the assistant's last message, so it cannot be continued")
        return text

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
        """Render messages as JSON has them: with tool calls and their results, content in parts, reasoning.

        The text is that of transformers' `apply_chat_template`: of a message, what is null is absent. `variables` are
        more names for the template, such as enable_thinking. Nothing is continued. Raises TemplateError, also where
        something given is not JSON.
        """
        more = {**self._special, **(variables or {})}
        if taken := [name for name in _OWN if name in more]:
            raise TemplateError(f"{taken[0]} is no variable to be given: the chat template has its own")
        shown = [_named({k: v for k, v in message.items() if v is not None}) for message in messages]
        given = {"messages": shown, "tools": tools, "documents": documents, **more}
        own = {"add_generation_prompt": generate, "strftime_now": Offered(lambda pattern: _date(now, pattern))}
        meter = Meter(_characters(given))
        _sandbox.meter = meter
        parts: list[str] = []
        total = 0
        try:
            for part in self._template.generate({**given, **own}):
                total += len(part)
                meter.fits(total)
                parts.append(part)
        except jinja2.TemplateError as err:
            raise TemplateError(err.message or type(err).__name__) from err
        except Exception as err:  # anything can go wrong in a template; the message is what there is to say
            raise TemplateError(f"the chat template failed: {err or type(err).__name__}") from err
        finally:
            _sandbox.meter = None
        return "".join(parts)


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning, if it has any, is there under the names that templates know."""
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _characters(value: Any, depth: int = 0) -> int:
    """Count the characters of all texts in a JSON value. Raises TemplateError if it is none, or nested too deep."""
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, (bool, int, float)):
        return 0
    if depth > MAX_DEPTH:
        raise TemplateError(f"what the chat template is given nests more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return sum(_characters(k) + _characters(v, depth + 1) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_characters(v, depth + 1) for v in value)
    raise TemplateError(f"the chat template is given a {type(value).__name__}, which is not JSON")


def _date(now: datetime, pattern: Any) -> str:
    if not isinstance(pattern, str) or len(pattern) > MAX_DATE_FORMAT or _DATE_WIDTH.search(pattern):
        raise TemplateError(f"strftime_now: the format {str(pattern)[:MAX_DATE_FORMAT]!r} is not allowed")
    return now.strftime(pattern)
