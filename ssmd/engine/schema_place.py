"""Where in a JSON schema that is which llguidance refuses: it says what, and mostly not where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from ssmd.engine.request import Grammar

_KEYWORD = re.compile(r'^Unimplemented keys: \["([^"]+)"')
_VALUE = re.compile(r"^(?:Unknown (format)|Invalid (type)): (.*)$")
_REFERENCE = re.compile(r"^(?:Pointer|Resource) '([^']*)'")
_IDENTIFIER = re.compile(r"\w+$")


def place_of(grammar: Grammar, why: str) -> tuple[str, bool]:
    """The parameter that a grammar was refused for, with the way to the keyword where that is known; and whether it is
    a schema. why: what llguidance says.
    """
    if not grammar.text.startswith("{"):
        return grammar.param, False
    first = json.loads(grammar.text)["grammars"][0]
    schema = first.get("json_schema")
    if schema is None:
        return grammar.param, False
    wanted = _wanted(why)
    if wanted is not None:
        for way, keyword, value in _keywords(schema, ""):
            if wanted(keyword, value):
                return grammar.param + way, True
    return grammar.param, True


def _wanted(why: str) -> Callable[[str, Any], bool] | None:
    """Whether a keyword with a value is what llguidance means."""
    if found := _KEYWORD.search(why):
        name = found[1]
        return lambda keyword, value: keyword == name
    if found := _VALUE.search(why):
        name, said = found[1] or found[2], found[3]
        return lambda keyword, value: keyword == name and value == said
    if found := _REFERENCE.search(why):
        said = found[1]
        return lambda keyword, value: keyword == "$ref" and str(value).lstrip("#") == said
    return None


def _keywords(value: Any, way: str) -> Iterator[tuple[str, str, Any]]:
    """Every key in a schema, in order, with the way to it and its value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            mine = f"{way}.{key}" if _IDENTIFIER.match(key) else f"{way}[{json.dumps(key)}]"
            yield mine, key, inner
            yield from _keywords(inner, mine)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _keywords(inner, f"{way}[{i}]")
