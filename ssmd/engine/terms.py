"""Terms below sampling and requests: the error for what cannot be run, what an answer has to be, work in steps."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

Steps = Generator[None]  # work that may be closed after any of its steps


class Rejected(Exception):
    """A request that cannot be run. The API turns it into the matching HTTP error; nothing was changed."""

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
    """What an answer has to be, as llguidance reads it: Lark or JSON. param: of the request, where it is wrong. parts:
    what it is made of, to find out which of them is. begun: it is not of the whole answer, but of each call in it,
    from behind the marker on that it begins with.
    """

    text: str
    param: str
    parts: tuple[Grammar, ...] = ()
    begun: bool = False
