"""A message of a conversation, in the one normal form that templates, sessions and the API share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """Normalised: null content is "", text parts are joined."""

    role: Role
    content: str
    name: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As a template and the store see it; absent fields are left out."""
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

    def same_as(self, other: Message) -> bool:
        """Whether a client's echo means this message: spaces around an assistant's text do not count."""
        if self.role == other.role == "assistant":
            return self.content.strip() == other.content.strip() and self.name == other.name
        return self == other
