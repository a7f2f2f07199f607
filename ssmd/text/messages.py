"""A message of a conversation, in the one normal form that templates, sessions and the API share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant")
THINK, THINK_END = "<think>", "</think>"  # around reasoning; some templates write the first one themselves


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant makes. id: what its result names it by. arguments: JSON, as it was written."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A message, normalised: null content is "", text parts are joined.

    tool_calls: the assistant's. tool_call_id: of a tool's message, the call whose result it is.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The message as a template and the store see it; absent fields are left out."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            fields["name"] = self.name
        return fields

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Message:
        """Reads what `to_json` wrote. Raises ValueError on anything else."""
        role, content, name = fields.get("role"), fields.get("content"), fields.get("name")
        if role not in ROLES or not isinstance(content, str) or not (name is None or isinstance(name, str)):
            raise ValueError(f"not a stored message: {fields!r}")
        return Message(role, content, name)

    @property
    def said(self) -> str:
        """What of an assistant's message is not reasoning, without the spaces around it. Others: the content."""
        if self.role != "assistant":
            return self.content
        return self.content.rpartition(THINK_END)[2].strip()

    @property
    def reasoning(self) -> str:
        """What an assistant thought before it spoke, "" if it did not: as chat templates find it."""
        if self.role != "assistant" or THINK_END not in self.content:
            return ""
        return self.content.partition(THINK_END)[0].rpartition(THINK)[2].strip()

    def same_as(self, echo: Message) -> bool:
        """Whether a client's echo means this message.

        Spaces around an assistant's text do not count. An echo may leave the reasoning out, but not change it.
        """
        if self.role != echo.role or self.name != echo.name or self.said != echo.said:
            return False
        if self.role != "assistant" or self.content.strip() == echo.content.strip():
            return True
        return THINK_END not in echo.content or self.reasoning == echo.reasoning
