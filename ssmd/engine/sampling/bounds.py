"""Schemas and grammars as clients send them: bounded, and made enforceable, before llguidance reads any of them.

Beyond these bounds reading takes minutes, gigabytes, or a stack that ends the process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from ssmd.engine.terms import Rejection
from ssmd.text.schemas import (
    LEAST,
    MAX_KEYS,
    MAX_PATTERN_CHARS,
    MAXIMUM,
    MOST,
    EnforceableSchema,
    UnsupportedSchema,
    enforceable,
    resolve,
    step,
)

_MAX_KEPT_CHARS = 8 << 10  # length of a schema that is kept as it is enforced: each turn sends its tools again
MAX_PARTS = 500  # properties of one object, or schemas of one list: the time to read them grows with the square
MAX_LEVELS = 1000  # levels, through references too: recursion overflows the stack, and ends the process, at 3,000
MAX_REMAINDERS = 200_000  # remainders by all `multipleOf` together: 100,000 of them take 0.4 s and 8 MiB to read
MAX_MEETING = 12  # patterns that all apply to one text: the time to read them doubles with each
MAX_LEVELS_TOGETHER = 64  # levels of `allOf` and references in which those are counted

MAX_LARK_BYTES = 32 << 10
MAX_RULES = 256  # rules: recursion overflows the stack, and ends the process, at 3,000

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")

# Any of these may force a part of an answer without end, as in A+ "A": the repetition takes every "A".
_ENDLESS = re.compile(r"[*+~\\]|,\s*\}|x-guidance|%regex")
_ONE_BY_ONE = '\n%llguidance {"no_forcing": true}\n'  # the last option counts
_RULE = re.compile(r"[\w\]}]\s*:")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//.*')  # texts, patterns and comments of Lark
_QUOTED_OR_SCHEMA = re.compile(rf"{_QUOTED.pattern}|(%json\s*(?=[{{\[\"]))")


def enforced(schema: Any, param: str) -> EnforceableSchema:
    """Return a schema as llguidance can enforce it. param: of the request. Raises Rejection."""
    text = json.dumps(schema)
    try:
        return _enforceable(text) if len(text) <= _MAX_KEPT_CHARS else enforceable(schema)
    except UnsupportedSchema as err:
        raise _unsupported(param + err.way, err.why) from None


@lru_cache(maxsize=64)
def _enforceable(text: str) -> EnforceableSchema:
    return enforceable(json.loads(text))


def check_size(schema: Any, param: str) -> None:
    """Raise Rejection if reading a schema would take long or a deep stack. param: of the request."""
    patterns, references, named, remainders = 0, set[str](), False, 0
    for count, (way, keyword, value) in enumerate(keywords({"": schema}, "")):
        way = way.removeprefix('[""]')
        if isinstance(value, dict) and not _counts(value):
            said = "can be at most one more than the number of required keys: a key could come twice"
            raise _unsupported(f"{param}{way}.minProperties", said)
        if count >= MAX_KEYS:
            raise _unsupported(param, f"has more than {MAX_KEYS} keys")
        if (isinstance(value, dict) or (isinstance(value, list) and keyword in _LISTS)) and len(value) > MAX_PARTS:
            raise _unsupported(f"{param}{way}", f"has {len(value)} parts, at most {MAX_PARTS} are possible")
        if keyword in _BOUNDS and isinstance(value, int | float) and not _is_kept(keyword, value):
            raise _unsupported(f"{param}{way}", "must be from -2^62 to 2^62 and exact as a 64-bit float")
        if isinstance(value, dict) and keyword == "patternProperties":
            patterns += sum(map(len, value))
        elif isinstance(value, str) and keyword == "pattern":
            patterns += len(value)
        elif isinstance(value, str) and keyword == "$ref":
            references.add(value)
        elif isinstance(value, str) and keyword in ("$id", "id"):
            named = True  # references may begin there
        if patterns > MAX_PATTERN_CHARS:
            said = f"has patterns of more than {MAX_PATTERN_CHARS} characters up to here"
            raise _unsupported(f"{param}{way}", said)
        if keyword == "multipleOf" and (count_here := _remainders(value)):
            remainders += count_here
            if remainders > MAX_REMAINDERS:
                said = f"has {remainders} remainders up to here, at most {MAX_REMAINDERS} are possible"
                raise _unsupported(f"{param}{way}", f"{said}; use a smaller multipleOf")
        if keyword == "allOf" and isinstance(value, list):
            _check_meeting(value, schema, f"{param}{way}")
    _check_levels(schema, references, named, param)


def _remainders(multiple: Any) -> int:
    """Return how many remainders a number has by `multipleOf`: llguidance has a state for each. 0.25 has 25.

    0 if it is 0, not a number, or if it is beyond the bounds of numbers.
    """
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < abs(multiple) <= MOST:
        return 0
    _, digits, exponent = Decimal(repr(multiple)).normalize().as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits)) + "0" * exponent)


def _check_meeting(some: list[Any], root: Any, where: str) -> None:
    """Raise Rejection if too many patterns or remainders of an `allOf` apply to one value. where: its place."""
    patterns, remainders = _meeting({"allOf": some}, root, {})
    if patterns > MAX_MEETING:
        said = f"has {patterns} patterns that apply to one text, at most {MAX_MEETING} are possible"
        raise _unsupported(where, said)
    if remainders > MAX_REMAINDERS:
        said = f"has more than {MAX_REMAINDERS} remainders together; use smaller ones in multipleOf"
        raise _unsupported(where, said)


def _meeting(schema: Any, root: Any, known: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """Return how many patterns apply to one value of a schema, and how many remainders. known: results, by id.

    What is deeper than MAX_LEVELS_TOGETHER levels is not counted; the trial meets it.
    """
    if not isinstance(schema, dict) or depth > MAX_LEVELS_TOGETHER:
        return 0, 1
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = 0, 1  # a circle adds nothing
    patterns, remainders = int("pattern" in schema), _remainders(schema.get("multipleOf")) or 1
    reference = schema.get("$ref")
    target = [resolve(root, reference)] if isinstance(reference, str) else []
    for keyword, parts in (("$ref", target), *((name, schema.get(name)) for name in ("allOf", "anyOf", "oneOf"))):
        found = [_meeting(one, root, known, depth + 1) for one in parts] if isinstance(parts, list) else []
        if keyword in ("anyOf", "oneOf") and found:  # one of them applies
            found = [(max(each[0] for each in found), max(each[1] for each in found))]
        for more in found:
            patterns += more[0]
            remainders = min(math.lcm(remainders, more[1]), MAX_REMAINDERS + 1)
    known[id(schema)] = patterns, remainders
    return patterns, remainders


def _check_levels(schema: Any, references: Collection[str], named: bool, param: str) -> None:
    """Raise Rejection if a schema nests too deeply. named: parts of it have an $id that references may use."""
    whole = levels = _levels(schema)
    counted = {id(schema)}
    for reference in references:
        target = None if named else resolve(schema, reference)
        if target is None:
            levels += whole
        elif id(target) not in counted:
            counted.add(id(target))
            levels += _levels(target)
        if levels > MAX_LEVELS:
            said = f"has more than {MAX_LEVELS} levels, with those of what it refers to"
            raise _unsupported(param, said)


def keywords(value: Any, way: str) -> Iterator[tuple[str, str, Any]]:
    """Yield every key of a schema, in order: (its path, the key, its value)."""
    if isinstance(value, dict):
        for key, inner in value.items():
            mine = way + step(key)
            yield mine, key, inner
            yield from keywords(inner, mine)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from keywords(inner, f"{way}[{i}]")


def _unsupported(param: str, why: str) -> Rejection:
    return Rejection(f"{param} {why}", code="unsupported_schema", param=param)


def _is_kept(keyword: str, bound: float) -> bool:
    """Return True if llguidance reads a bound as exactly this number."""
    return (LEAST <= bound <= MOST and float(bound) == bound) or (keyword == "maximum" and bound == MAXIMUM)


def _counts(schema: dict[str, Any]) -> bool:
    """Return True if `minProperties` is at most one more than the number of required properties."""
    least, required = schema.get("minProperties"), schema.get("required")
    return not isinstance(least, int) or least <= 1 + (len({*map(str, required)}) if isinstance(required, list) else 0)


def _levels(value: Any) -> int:
    """Count how deep objects and lists are nested."""
    levels, inner = 0, [value]
    while inner := [one for one in inner if isinstance(one, dict | list)]:
        levels += 1
        inner = [one for many in inner for one in (many.values() if isinstance(many, dict) else many)]
    return levels


def enforceable_lark(text: str, param: str) -> tuple[str, tuple[str, ...]]:
    """Return a grammar whose schemas (%json) are as llguidance can enforce them, and the paths of ignored keywords.

    param: of the request. Raises Rejection, also if reading the grammar would take long or a deep stack.
    """
    if len(text.encode()) > MAX_LARK_BYTES or len(_RULE.findall(text)) > MAX_RULES:
        raise _wrong(param, f"is too large: {MAX_LARK_BYTES} bytes and {MAX_RULES} rules are possible in Lark")
    if (meeting := _QUOTED.sub("", text).count("&")) > MAX_MEETING:
        raise _wrong(param, f"has {meeting} intersections (&), at most {MAX_MEETING} are possible")
    parts, ignored, count, at = list[str](), list[str](), 0, 0
    while found := _QUOTED_OR_SCHEMA.search(text, at):
        parts.append(text[at : found.end()])
        at = found.end()
        if found[1] is None:
            continue
        try:
            schema, at = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise _wrong(param, "has a schema (%json) that is not JSON") from None
        where = f"{param}.%json[{count}]"
        count += 1
        check_size(schema, where)
        if isinstance(schema, dict):
            options = {key: schema.pop(key) for key in ("x-guidance",) if key in schema}  # llguidance's own keyword
            one = enforced(schema, where)
            ignored += (where + way for way in one.ignored)
            schema = {**one.schema, **options}
        parts.append(json.dumps(schema, ensure_ascii=False))
    return "".join([*parts, text[at:]]), tuple(ignored)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of floats")
    return value


_JSON = json.JSONDecoder(parse_float=_number, parse_constant=_number)


def held(text: str) -> str:
    """Return the grammar, with forcing turned off if a forced part of an answer might have no end.

    llguidance computes forced bytes in a loop without a bound, so an endless part would block the process.
    """
    return text + _ONE_BY_ONE if _ENDLESS.search(text) else text


def _wrong(param: str, why: str) -> Rejection:
    return Rejection(f"{param} {why}", code="invalid_value", param=param)
