"""Lark grammars before llguidance reads them: how large they may be, and so may the schemas within them."""

from __future__ import annotations

import json
import re

from ssmd.engine.schema import check_size
from ssmd.engine.terms import Rejected

MAX_BYTES = 32 << 10
MAX_RULES = 256  # they are read by recursion, and a stack ends, with the process, at 3,000

# With any of these a part of an answer may be bound to go on without end, as in A+ "A": what is repeated takes it all.
_ENDLESS = re.compile(r"[*+~\\]|,\s*\}|x-guidance|%regex")
_ONE_BY_ONE = '\n%llguidance {"no_forcing": true}\n'  # the last one counts
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


def held(text: str) -> str:
    """A grammar of which llguidance says in finite time what is bound to come: nothing, where that might have no end.

    It asks for no more than the next byte that is possible, in a loop that nothing bounds, and holds up the process.
    """
    return text + _ONE_BY_ONE if _ENDLESS.search(text) else text


def _wrong(param: str, why: str) -> Rejected:
    return Rejected(f"{param} {why}", code="invalid_value", param=param)
