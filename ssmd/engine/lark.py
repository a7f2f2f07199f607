"""Lark grammars before llguidance reads them: how large they may be, and so may the schemas within them."""

from __future__ import annotations

import json
import re

from ssmd.engine.request import Rejected
from ssmd.engine.schema import check_size

MAX_BYTES = 32 << 10
MAX_RULES = 256  # they are read by recursion, and a stack ends, with the process, at 3,000

_RULE = re.compile(r"[\w\]}]\s*:")
_SCHEMA = re.compile(r"%json\s*(?=[{\[\"])")


def check_lark(text: str, param: str) -> None:
    """Check that a grammar takes no long time to read, and no deep stack. param: of the request. Raises Rejected."""
    if len(text.encode()) > MAX_BYTES or len(_RULE.findall(text)) > MAX_RULES:
        raise _wrong(param, f"is too large: {MAX_BYTES} bytes and {MAX_RULES} rules are possible in Lark")
    for found in _SCHEMA.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise _wrong(param, "has a schema (%json) that is no JSON") from None
        check_size(schema, param)


def _wrong(param: str, why: str) -> Rejected:
    return Rejected(f"{param} {why}", code="invalid_value", param=param)
