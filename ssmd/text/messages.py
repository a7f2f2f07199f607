"""A message of a conversation, in the one normal form that templates, sessions and the API share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ssmd.text.arguments import canonical

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")
THINK, THINK_END = "<think>", "</think>"  # around reasoning; some templates write the first one themselves


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant makes. id: the result refers to it. arguments: JSON text as it was written."""

    id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """Return the call in the form of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> ToolCall:
        """Return the object that `to_json` wrote. Raises ValueError if it did not write these fields."""
        match fields:
            case {"id": str(id_), "function": {"name": str(name), "arguments": str(arguments)}}:
                return ToolCall(id_, name, arguments)
        raise ValueError(f"not a tool call: {fields!r}")

    @property
    def said(self) -> tuple[str, str]:
        """The called tool and its canonical arguments. The id does not count: it only names the call."""
        return self.name, canonical(self.arguments)


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
        """Return the message in the form of OpenAI's API, without absent fields."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_calls:
            fields["tool_calls"] = [call.to_json() for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return fields

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Message:
        """Return the object that `to_json` wrote. Raises ValueError if it did not write these fields."""
        role, content, name = fields.get("role"), fields.get("content"), fields.get("name")
        calls, call = fields.get("tool_calls", ()), fields.get("tool_call_id")
        named = all(one is None or isinstance(one, str) for one in (name, call))
        fits = (role == "assistant" or not calls) and (call is None) == (role != "tool")
        if role not in ROLES or not isinstance(content, str) or not named or not fits:
            raise ValueError(f"not a stored message: {fields!r}")
        return Message(role, content, name, tuple(map(ToolCall.from_json, calls)), call)

    @property
    def words(self) -> list[str]:
        """Its content, and the names and arguments of its calls."""
        return [self.content, *(text for call in self.tool_calls for text in (call.name, call.arguments))]

    @property
    def texts(self) -> list[str]:
        """All texts in it that come from outside."""
        return [*self.words, self.name or "", self.tool_call_id or "", *(call.id for call in self.tool_calls)]

    @property
    def said(self) -> str:
        """An assistant's message without its reasoning and the spaces around it; the content of other messages."""
        if self.role != "assistant":
            return self.content
        return self.content.rpartition(THINK_END)[2].strip()

    @property
    def reasoning(self) -> str:
        """An assistant's reasoning, found as chat templates find it; "" if there is none."""
        if self.role != "assistant" or THINK_END not in self.content:
            return ""
        return self.content.partition(THINK_END)[0].rpartition(THINK)[2].strip()

    def same_as(self, echo: Message) -> bool:
        """Return True if a client's echo means this message.

        Spaces around an assistant's text do not count, nor the spelling of a call's arguments, nor ids. Which call a
        tool's message answers is compared over all messages (sessions/match.py). An echo may leave the reasoning out,
        but not change it.
        """
        if self.role != echo.role or self.name != echo.name or self.said != echo.said:
            return False
        if self.tool_calls != echo.tool_calls and [c.said for c in self.tool_calls] != [
            c.said for c in echo.tool_calls
        ]:
            return False
        if self.role != "assistant" or self.content.strip() == echo.content.strip():
            return True
        return THINK_END not in echo.content or self.reasoning == echo.reasoning


@dataclass(frozen=True)
class BlockEnd:
    """The end of one of the blocks that a client's message has: a place at which later prompts may differ."""

    message: int  # its index in the conversation
    characters: int | None  # of the message's content up to there; None: the message's end
    marked: bool  # the client asks to cache up to there (`cache_control`)
