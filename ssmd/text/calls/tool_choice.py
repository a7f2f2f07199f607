"""A client's choice of tool calls: if the model may call tools, which ones, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolChoice:
    """The client's choice of tool calls in an answer.

    mode: `auto` lets the model choose, `required` forces at least one call, `none` takes calls for text.
    name: the only tool to be called; the answer is that one call. parallel: an answer may have several calls.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


AUTO = ToolChoice()
