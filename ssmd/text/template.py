"""Chat templates: from messages to the text that a model was trained to see."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2

from ssmd.artifact import SpecialTokens
from ssmd.text.messages import Message
from ssmd.text.meter import Meter
from ssmd.text.sandbox import Offered, Sandbox

MAX_SOURCE = 128 << 10  # characters; the longest in use have about 30,000
MAX_DATE_FORMAT = 100
# Stands behind a message that is to be continued. The space tells whether the template trims.
_HERE = "\U0010fff8here\U0010fff8"

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
            return self._run([m.to_json() for m in messages], now, generate)
        *before, last = messages
        marked = {**last.to_json(), "content": f"{last.content}{_HERE} "}
        text = self._run([*(m.to_json() for m in before), marked], now, generate=False)
        at = text.rfind(_HERE)
        if at < 0:
            raise TemplateError("the chat template drops the assistant's last message, so it cannot be continued")
        trims = not text.startswith(f"{_HERE} ", at)
        text = text[:at].rstrip() if trims else text[:at]
        if not text.rstrip().endswith(last.content.strip()):
            raise TemplateError("the chat template changes the assistant's last message, so it cannot be continued")
        return text

    def _run(self, messages: list[dict[str, Any]], now: datetime, generate: bool) -> str:
        meter = Meter(sum(len(m["content"]) for m in messages))
        _sandbox.meter = meter
        parts: list[str] = []
        total = 0
        try:
            for part in self._template.generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=generate,
                strftime_now=Offered(lambda pattern: _date(now, pattern)),
                **self._special,
            ):
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


def _date(now: datetime, pattern: Any) -> str:
    # A width in front of a directive ("%999999999d") would be obeyed by the C library.
    if not isinstance(pattern, str) or len(pattern) > MAX_DATE_FORMAT or any(c.isdigit() for c in pattern):
        raise TemplateError(f"strftime_now: the format {str(pattern)[:MAX_DATE_FORMAT]!r} is not allowed")
    return now.strftime(pattern)
