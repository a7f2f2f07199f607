"""A client's choice of tool calls: if the model may call tools, which ones, and how many at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ToolChoice:
    """The client's choice of tool calls in an answer.

    mode: `auto` lets the model choose, `required` forces at least one call, `none` takes calls for text.
    name: the only tool to be called; the answer is that one call. parallel: an answer may have several calls.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True

    def binds(self, function: Mapping[str, Any]) -> bool:
        """Return True if the arguments of a call of this function must be valid."""
        if self.mode == "required":
            return self.name is None or function.get("name") == self.name
        return self.mode == "auto" and bool(function.get("strict"))


AUTO = ToolChoice()
