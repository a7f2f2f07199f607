"""JSON from outside, strictly read, such that refusing it costs no more than reading it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

_MANY = 16
_PART = re.compile(rb'(?:[^"\\]++|\\.){0,4096}+', re.DOTALL)  # of a text: while one is looked for, nothing else is done


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


def too_many(raw: bytes, limit: int, signs: bytes = b"[{") -> bool:
    """Whether JSON has more than so many of these signs outside of its texts, before anything is made of it: an object
    takes up to 100 bytes, and while all of them are made nothing else is.
    """
    if sum(map(raw.count, signs)) <= limit:  # some of them may be text
        return False
    sign = re.compile(b'"[^"\\\\]{0,255}+"|["' + re.escape(signs) + b"]")
    found = at = 0
    while begin := sign.search(raw, at):
        at = begin.end()
        if at - begin.start() > 1:  # a short text
            continue
        if begin[0] == b'"':
            while (part := _PART.match(raw, at)) and part.end() > at:
                at = part.end()
            at += 1
        else:
            found += 1
            if found > limit:
                return True
    return False
