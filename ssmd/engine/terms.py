"""Terms below sampling and requests: the error for a request that cannot run, an answer's grammar, work in steps."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

Steps = Generator[None]  # work that may be closed after any of its steps


class Rejection(Exception):
    """A request that cannot run. The API turns it into the matching HTTP error; nothing was changed."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class PromptTooLong(Rejection):
    """A prompt that does not fit the context. context: most tokens. tokens: as many as it has, or more."""

    def __init__(self, message: str, context: int, tokens: int, *, param: str, advice: str) -> None:
        super().__init__(message, code="context_length_exceeded", param=param)
        self.context, self.tokens, self.advice = context, tokens, advice


def too_long(context: int, tokens: int, *, param: str, advice: str) -> PromptTooLong:
    """Build the error for a prompt that does not fit the context.

    Agents shorten their history if they find words of OpenAI's in the text, as SDKs hand on nothing else. A test holds
    them against the patterns of fourteen agents. No double quotes: Python's repr would escape its apostrophe then.
    """
    return PromptTooLong(
        f"This model's maximum context length is {context} tokens. However, your {param} resulted in {tokens} tokens "
        f"or more: the prompt is too long and exceeds the context window. {advice}",
        context,
        tokens,
        param=param,
        advice=advice,
    )


@dataclass(frozen=True)
class Grammar:
    """The grammar of an answer, as llguidance reads it: Lark or JSON."""

    text: str
    param: str  # field of the request, for errors
    parts: tuple[Grammar, ...] = ()  # its parts, to find the wrong one
    begun: bool = False  # it applies to each tool call after its opening marker, not to the whole answer
    ignored: tuple[str, ...] = ()  # keywords of its schema that it does not enforce, as paths from the request's field
    numbers: bool = False  # a run of digits outside strings is a number of JSON, and is bounded
