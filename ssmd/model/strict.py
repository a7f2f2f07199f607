"""Untrusted JSON, read strictly. Refusing it costs no more than reading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

_MANY = 16
_PART_BYTES = 256 << 10


class Strict(BaseModel):
    """A JSON object of known fields with exactly their declared types: "1" is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, value: Any) -> Any:
        """Report only one unknown name, in an error of the whole object, if there are very many."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + _MANY:
            stranger = next(name for name in value if name not in cls.model_fields)
            raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted", {"name": (stranger,)})
        return value


def too_many(raw: bytes, limit: int, signs: bytes = b"[{", go_on: Callable[[], None] = lambda: None) -> bool:
    """Return True if JSON has more than `limit` of these signs outside of its texts.

    This is checked before parsing: each object takes up to 100 bytes, and parsing blocks all other threads. The cost
    per byte does not depend on the bytes. go_on: called for each part; it may raise.
    """
    if sum(map(raw.count, signs)) <= limit:  # some of them may be text
        return False
    found, at, within = 0, 0, False
    while at < len(raw):
        go_on()
        part = raw[at : at + _PART_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # what it escapes is part of it
            part = raw[at : at + _PART_BYTES + 1]
        at += len(part)
        if b'\\"' in part:
            part = part.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        seen = np.frombuffer(part, np.uint8)  # (N,)
        outside = np.logical_xor.accumulate(seen == ord('"')) == within  # (N,): of texts
        found += sum(int(np.count_nonzero((seen == sign) & outside)) for sign in signs)
        if found > limit:
            return True
        within = not outside[-1]
    return False
