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


@dataclass(frozen=True)
class Grammar:
    """The grammar of an answer, as llguidance reads it: Lark or JSON."""

    text: str
    param: str  # field of the request, for errors
    parts: tuple[Grammar, ...] = ()  # its parts, to find the wrong one
    begun: bool = False  # it applies to each tool call after its opening marker, not to the whole answer
