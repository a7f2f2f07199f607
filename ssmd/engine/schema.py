"""JSON schemas before and after llguidance has read them: how large they may be, and where that is which it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from ssmd.engine.request import Rejected

MAX_PARTS = 500  # properties of one object, or schemas of one list: the time to read them grows with the square
MAX_KEYS = 10_000  # of all objects together

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_KEYWORD = re.compile(r'^Unimplemented keys: \["([^"]+)"')
_VALUE = re.compile(r"^(?:Unknown (format)|Invalid (type)): (.*)$")
_REFERENCE = re.compile(r"^(?:Pointer|Resource) '([^']*)'")
_NAME = re.compile(r"[\w$]+")


def check_size(schema: Any, param: str) -> None:
    """Check that a schema takes no long time to read. param: of the request. Raises Rejected."""
    for count, (way, keyword, value) in enumerate(_keywords(schema, "")):
        if count >= MAX_KEYS:
            said = f"{param} has more than {MAX_KEYS} keys"
            raise Rejected(said, code="unsupported_schema", param=param)
        if (isinstance(value, dict) or (isinstance(value, list) and keyword in _LISTS)) and len(value) > MAX_PARTS:
            said = f"{param}{way} has {len(value)} parts, at most {MAX_PARTS} are possible"
            raise Rejected(said, code="unsupported_schema", param=f"{param}{way}")


def place_of(schema: Any, why: str) -> str:
    """The way to the keyword that llguidance refuses, "" if that is not known. why: what it says."""
    wanted = _wanted(why)
    if wanted is not None:
        for way, keyword, value in _keywords(schema, ""):
            if wanted(keyword, value):
                return way
    return ""


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
            mine = f"{way}.{key}" if _NAME.fullmatch(key) else f"{way}[{json.dumps(key)}]"
            yield mine, key, inner
            yield from _keywords(inner, mine)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _keywords(inner, f"{way}[{i}]")
