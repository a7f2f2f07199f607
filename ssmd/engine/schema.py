"""JSON schemas before and after llguidance has read them: how large they may be, and where that is which it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any
from urllib.parse import unquote

from ssmd.engine.terms import Rejected

MAX_PARTS = 500  # properties of one object, or schemas of one list: the time to read them grows with the square
MAX_KEYS = 10_000  # of all objects together
MAX_LEVELS = 1000  # through references, too: they are read by recursion, and a stack ends, with the process, at 3,000
MAX_PATTERN_CHARS = 16 << 10  # of all patterns: the time to read one grows faster than its length
# Bounds of numbers. llguidance reads them as floats, and near the least integer of 64 bits it ends the process.
LEAST, MOST = -(1 << 62), 1 << 62
MAXIMUM = (1 << 63) - 1  # of what many call a long: it comes out as that

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_KEYWORD = re.compile(r'^Unimplemented keys: \["([^"]+)"')
_VALUE = re.compile(r"^(?:Unknown (format)|Invalid (type)): (.*)$")
_REFERENCE = re.compile(r"^(?:Pointer|Resource) '([^']*)'")
_NAME = re.compile(r"[\w$]+")


def check_size(schema: Any, param: str) -> None:
    """Check that a schema takes no long time to read, and no deep stack. param: of the request. Raises Rejected."""
    patterns, references, named = 0, set[str](), False
    for count, (way, keyword, value) in enumerate(_keywords({"": schema}, "")):
        way = way.removeprefix('[""]')
        if isinstance(value, dict) and not _counts(value):
            said = "is possible up to one more than what is required: nothing keeps a key from coming twice"
            raise _unsupported(f"{param}{way}.minProperties", said)
        if count >= MAX_KEYS:
            raise _unsupported(param, f"has more than {MAX_KEYS} keys")
        if (isinstance(value, dict) or (isinstance(value, list) and keyword in _LISTS)) and len(value) > MAX_PARTS:
            raise _unsupported(f"{param}{way}", f"has {len(value)} parts, at most {MAX_PARTS} are possible")
        if keyword in _BOUNDS and isinstance(value, int | float) and not _is_kept(keyword, value):
            raise _unsupported(f"{param}{way}", "is possible from -2^62 to 2^62, where it is exact as a 64-bit float")
        if isinstance(value, dict) and keyword == "patternProperties":
            patterns += sum(map(len, value))
        elif isinstance(value, str) and keyword == "pattern":
            patterns += len(value)
        elif isinstance(value, str) and keyword == "$ref":
            references.add(value)
        elif isinstance(value, str) and keyword in ("$id", "id"):
            named = True  # ways from a root may begin there
        if patterns > MAX_PATTERN_CHARS:
            said = f"has patterns of more than {MAX_PATTERN_CHARS} characters up to here"
            raise _unsupported(f"{param}{way}", said)
    _check_levels(schema, references, named, param)


def _check_levels(schema: Any, references: Collection[str], named: bool, param: str) -> None:
    """Check that a schema is not read too deeply. named: parts of it have names, by which it may refer to them."""
    whole = levels = _levels(schema)
    counted = {id(schema)}
    for reference in references:
        target = None if named else _target(schema, reference)
        if target is None:
            levels += whole
        elif id(target) not in counted:
            counted.add(id(target))
            levels += _levels(target)
        if levels > MAX_LEVELS:
            said = f"has more than {MAX_LEVELS} levels, with those of what it refers to"
            raise _unsupported(param, said)


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


def _unsupported(param: str, why: str) -> Rejected:
    return Rejected(f"{param} {why}", code="unsupported_schema", param=param)


def _is_kept(keyword: str, bound: float) -> bool:
    """Whether llguidance takes a bound for what it is."""
    return (LEAST <= bound <= MOST and float(bound) == bound) or (keyword == "maximum" and bound == MAXIMUM)


def _counts(schema: dict[str, Any]) -> bool:
    """Whether an object has as many properties as a schema wants, if it has those that are required."""
    least, required = schema.get("minProperties"), schema.get("required")
    return not isinstance(least, int) or least <= 1 + (len({*map(str, required)}) if isinstance(required, list) else 0)


def _target(schema: Any, reference: str) -> Any:
    """What a reference points to; None where no way from the schema's root tells."""
    found = schema if reference.startswith("#/") or reference == "#" else None
    if found is not None and reference != "#":
        for step in unquote(reference[2:]).split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(key)
            elif isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
    return found


def _levels(value: Any) -> int:
    """How many objects and lists stand within each other."""
    levels, inner = 0, [value]
    while inner := [one for one in inner if isinstance(one, dict | list)]:
        levels += 1
        inner = [one for many in inner for one in (many.values() if isinstance(many, dict) else many)]
    return levels
