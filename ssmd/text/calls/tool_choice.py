"""What a client says about calling its tools: whether, which, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolChoice:
    """Whether an answer may or must call tools.

    mode: `auto` as the model likes, `required` at least one call, `none` no call: what looks like one is text.

    name: the only tool to be called; the answer is that one call. parallel: several calls in an answer are welcome.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


AUTO = ToolChoice()
