"""JSON from outside, strictly read, such that refusing it costs no more than reading it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

_MANY = 16
_BEGINS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{]', re.DOTALL)


class Strict(BaseModel):
    """An object of known fields, of the types they are said to have: "1" is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, value: Any) -> Any:
        """One unknown name of very many is told, by an error of the whole."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + _MANY:
            stranger = next(name for name in value if name not in cls.model_fields)
            raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted", {"name": (stranger,)})
        return value


def too_many(raw: bytes, limit: int) -> bool:
    """Whether JSON has more than so many objects and lists, before they are made: each takes up to 100 bytes."""
    if raw.count(b"[") + raw.count(b"{") <= limit:  # some of them may be text
        return False
    found = 0
    for begin in _BEGINS.finditer(raw):
        found += begin.end() - begin.start() == 1
        if found > limit:
            return True
    return False
