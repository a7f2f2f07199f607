"""Grammars, in Lark for llguidance, of arguments in tags: strings as they are, other values as JSON.

Values are written as templates write them, so that a later request renders the generated text: `True` and `None` for
a boolean and null by themselves. A value ends at the first line that is its last tag, and its text must not be read as
the end of a value (call.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ssmd.text.calls.tagged.call import END_PATTERNS, PARAMETER, PARAMETER_END
from ssmd.text.calls.tagged.kinds import CONSTANTS, Known, kinds
from ssmd.text.closed import names_all
from ssmd.text.patterns import alternatives
from ssmd.text.schemas import UnsupportedSchema, allows_all, resolve, step, type_of

_ANY = "(?s:.*)"
_END = f"\n{PARAMETER_END}\n"
# Beginnings of values by their type, which a string beside that type must not have: it would be read as one of them.
_BEGINNINGS = {
    "integer": r"-?(0|[1-9][0-9]*)\n",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\n",
    "array": r"[ \t\r\n]*\[",
    "object": r"[ \t\r\n]*\{",
}
_CONSTANTS = ((True, "boolean", "True"), (False, "boolean", "False"), (None, "null", "None"))
_NAMES = r"/[^<>\n]+/ & ~/([ \"'](?s:.*)|(?s:.*)[ \"'])/"  # that can stand in a tag
_MAX_STEPS = 12  # references and alternatives that are followed, one behind the other
_MAX_PARTS = 10_000  # parts of a schema that are followed, each as often as it is referred to
_MAX_CHARS = 256 << 10  # characters of the rules
_HEX = "[0-9a-fA-F]"
_HOST = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_SPAN = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_ATOM = "[A-Za-z0-9!#$%&'*+\\/=?^_`{|}~-]+"
_URI = r"([A-Za-z0-9._~:\/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
_SIX = "|".join(
    f"({_HEX}{{1,4}}:){{{n - 1}}}{_HEX}{{1,4}}::(({_HEX}{{1,4}}:){{0,{6 - n}}}{_HEX}{{1,4}})?" for n in range(1, 7)
)
# Texts of each format, all of them valid. Those of February 29 are left out.
_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P([0-9]+W|{_DAYS}({_SPAN})?|{_SPAN})",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}(\.{_HOST})*",
    "hostname": rf"{_HOST}(\.{_HOST})*",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|::(({_HEX}{{1,4}}:){{0,6}}{_HEX}{{1,4}})?|{_SIX}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:{_URI}(#{_URI})?",
}


def rules(name: str, schema: Any, spacing: Mapping[str, Any]) -> list[str]:
    """Return the rules of a call's arguments; the first one has this name. Raises UnsupportedSchema.

    schema: of the object of arguments, enforceable and closed. spacing: of JSON, as llguidance takes it.
    """
    return _Arguments(name, schema, spacing).rules()


class _Arguments:
    """Writes the rules of one call."""

    def __init__(self, name: str, root: Any, spacing: Mapping[str, Any]) -> None:
        self._name, self._root, self._spacing = name, root, spacing
        self._rules: list[str] = []
        self._values = self._parts = self._chars = 0
        self._known: Known = {}

    def rules(self) -> list[str]:
        ways = [self._object(one, way) for one, way in self._shapes(self._root, "", 0)]
        return [f"{self._name}: {' | '.join(ways)}", *self._rules]

    def _shapes(self, schema: Any, way: str, depth: int) -> list[tuple[dict[str, Any], str]]:
        """Return the shapes that an object may have, each with its place: the schemas that it joins are made one."""
        self._count(way)
        if depth > _MAX_STEPS:
            raise UnsupportedSchema(way, "refers to itself, which is not supported for this model's calls")
        if not isinstance(schema, dict):
            return [({}, way)] if schema is not False else []
        found = [({key: value for key, value in schema.items() if key not in _JOINS}, way)]
        groups = [[(resolve(self._root, schema["$ref"]), f"{way}.$ref")]] if "$ref" in schema else []
        groups += [[(one, f"{way}.allOf[{i}]")] for i, one in enumerate(schema.get("allOf", []))]
        for key in _EITHER:
            if key in schema:
                groups.append([(one, f"{way}.{key}[{i}]") for i, one in enumerate(schema[key])])
        for group in groups:
            more = [shape for one, at in group for shape in self._shapes(one, at, depth + 1)]
            self._count(way, len(found) * len(more))
            found = [(_joined(a, b, at), at) for a, _ in found for b, at in more]
        return found

    def _object(self, schema: dict[str, Any], way: str) -> str:
        """Write the arguments of one shape, in the order of its properties."""
        required = schema.get("required", [])
        for key in ("minProperties", "maxProperties", "propertyNames", "dependentRequired"):
            if key in schema:
                raise UnsupportedSchema(f"{way}.{key}", "is not supported for this model's calls; use required")
        properties = {**schema.get("properties", {})}
        for name in required:  # one that the schema does not name
            properties.setdefault(name, schema.get("additionalProperties", True))
        parts = []
        for name, one in properties.items():
            at = f"{way}.properties{step(name)}"
            if one is False:
                continue
            if not name or name != name.strip(" \"'") or re.search(r"[<>\n]", name):
                raise UnsupportedSchema(at, "has a name that this model's calls cannot have: <, >, line breaks, quotes")
            value = self._value(one, at)
            parts.append(f"({_text(f'{PARAMETER}{name}>')} {value}){'' if name in required else '?'}")
        parts += self._others(schema, properties, way)
        return " ".join(parts) or '""'

    def _others(self, schema: dict[str, Any], named: Mapping[str, Any], way: str) -> list[str]:
        """Write arguments that the schema does not name."""
        if names_all(schema):
            return []
        others = [(r"[A-Za-z0-9_.$-]+", schema.get("additionalProperties", True), f"{way}.additionalProperties")]
        for pattern, one in schema.get("patternProperties", {}).items():
            at = f"{way}.patternProperties{step(pattern)}"
            others.append((f"{_pattern(pattern, at)[1:-1]}", one, at))
        if len({kinds(one, self._root, self._known) for _, one, _ in others if one is not False}) > 1:
            why = "allows values of other types under names of another kind, which this model's calls cannot tell apart"
            raise UnsupportedSchema(others[-1][2], why)
        found = []
        for i, (pattern, one, at) in enumerate(others):
            if one is False:
                continue
            kind = f"{self._name.upper()}_NAME{len(self._rules)}"
            known = [f"~{_text(name)}" for name in named]
            known += [f"~/{more}/" for more, _, _ in others[1:] if not i]
            names = " & ".join([f"/{pattern}/", _NAMES, *known])
            self._rules.append(f"{kind}: {names}")
            found.append(f'({_text(PARAMETER)} {kind} ">" {self._value(one, at)})')
        return [f"({' | '.join(found)})*"] if found else []

    def _value(self, schema: Any, way: str) -> str:
        """Add the rules of a value with the line breaks around it and its last tag. Return their name."""
        self._values += 1
        name, before = f"{self._name}_{self._values}", len(self._rules)
        allowed = kinds(schema, self._root, self._known)
        words = [_text(word) for value, kind, word in _CONSTANTS if kind in allowed and self._permits(schema, value, 0)]
        rest = frozenset[str]() if allows_all(schema) else allowed - {"string", "boolean", "null"}
        texts = self._strings(schema, way, 0) if "string" in allowed else None
        lines = [f"({' | '.join(words)}) {_text(_END)}"] if words else []
        if texts is not None:
            others = [f"{word}{_escaped(_END)}" for word, (kind, _) in CONSTANTS.items() if kind in allowed]
            others += (f"{_BEGINNINGS[kind]}{_ANY}" for kind in sorted(rest))
            # One exclusion from the whole: several, or one before its end, are too costly to follow.
            lines.append(f"(({texts}) {_text(_END)}) & ~/{'|'.join([_WITH_END, *others])}/")
        ways = []
        if lines:
            kind = f"{name.upper()}_TEXT"
            self._rules += [f"{name}_text[lazy]: {kind}", f"{kind}: {' | '.join(f'({line})' for line in lines)}"]
            ways.append(f"{_text(chr(10))} {name}_text")
        if rest:
            ways.append(f"{_text(chr(10))} {name}_json {_text(_END)}")
            part = {**self._embedded(_only(schema, rest, allowed)), "x-guidance": dict(self._spacing)}
            self._rules.append(f"{name}_json: %json {json.dumps(part)}")
        if not ways:
            raise UnsupportedSchema(way, "allows no value")
        self._rules.append(f"{name}: {' | '.join(ways)}")
        self._chars += sum(map(len, self._rules[before:]))
        if self._chars > _MAX_CHARS:
            raise UnsupportedSchema(way, f"comes to a grammar of more than {_MAX_CHARS} characters up to here")
        return name

    def _count(self, way: str, parts: int = 1) -> None:
        """Count parts of the schema that are followed. Raises UnsupportedSchema if these are too many."""
        self._parts += parts
        if self._parts > _MAX_PARTS:
            raise UnsupportedSchema(way, f"has more than {_MAX_PARTS} alternatives, with those of what it refers to")

    def _embedded(self, schema: Any) -> dict[str, Any]:
        """Return a part of the schema as one of its own, with what it refers to."""
        made: dict[str, Any] = schema if isinstance(schema, dict) else {}
        if '"$ref"' not in json.dumps(made):
            return made
        return {**_moved(made), "$defs": {"arguments": _moved(self._root)}}

    def _permits(self, schema: Any, value: bool | None, depth: int) -> bool:
        """Return True if a boolean or null is valid by a schema."""
        self._count("")
        if not isinstance(schema, dict) or depth > _MAX_STEPS:
            return schema is not False
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and not any(one is value for one in listed):
            return False
        parts = [resolve(self._root, schema["$ref"])] if "$ref" in schema else []
        parts += schema.get("allOf", [])
        if type_of(value) not in kinds({"type": schema["type"]} if "type" in schema else {}, None):
            return False
        either = all(any(self._permits(one, value, depth + 1) for one in schema[k]) for k in _EITHER if k in schema)
        return either and all(self._permits(one, value, depth + 1) for one in parts)

    def _strings(self, schema: Any, way: str, depth: int) -> str | None:
        """Return an expression for the strings that are valid by a schema; None if none is."""
        self._count(way)
        if not isinstance(schema, dict):
            return None if schema is False else f"/{_ANY}/"
        if depth > _MAX_STEPS:
            raise UnsupportedSchema(way, "refers to itself, which is not supported for strings of this model's calls")
        if "string" not in kinds({"type": schema["type"]} if "type" in schema else {}, None):
            return None
        every: list[str | None] = []
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list):
            words = [_text(one) for one in listed if isinstance(one, str)]
            every.append(f"({' | '.join(words)})" if words else None)
        if isinstance(pattern := schema.get("pattern"), str):
            every.append(_pattern(pattern, f"{way}.pattern"))
        if format_ := _FORMATS.get(str(schema.get("format"))):
            every.append(f"/{format_}/")
        if (least := schema.get("minLength", 0)) or "maxLength" in schema:
            every.append(f"/(?s:.{{{least},{schema.get('maxLength', '')}}})/")
        if "$ref" in schema:
            every.append(self._strings(resolve(self._root, schema["$ref"]), way, depth + 1))
        for key in _EITHER:
            if key in schema:
                some = [self._strings(one, f"{way}.{key}[{i}]", depth + 1) for i, one in enumerate(schema[key])]
                known = [one for one in some if one is not None]
                every.append(f"({' | '.join(known)})" if known else None)
        every += (self._strings(one, f"{way}.allOf[{i}]", depth + 1) for i, one in enumerate(schema.get("allOf", [])))
        if None in every:
            return None
        return " & ".join(f"({one})" for one in every) or f"/{_ANY}/"


_EITHER = ("anyOf", "oneOf")
_JOINS = ("$ref", "allOf", *_EITHER)


def _joined(one: dict[str, Any], other: dict[str, Any], way: str) -> dict[str, Any]:
    """Return the schema of objects that are valid by two schemas. Only properties that one of them names are kept."""
    if not one.keys() & {"properties", "required", "additionalProperties", "patternProperties"}:
        return {**one, **other}
    properties = {**one.get("properties", {})}
    for name, schema in other.get("properties", {}).items():
        properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
    required = list(dict.fromkeys([*one.get("required", []), *other.get("required", [])]))
    for one_of_them in (one, other):
        if one_of_them.get("additionalProperties") is False:
            properties = {name: properties[name] for name in properties if name in one_of_them.get("properties", {})}
    if lost := sorted({*required} - {*properties}):
        raise UnsupportedSchema(way, f"does not name {json.dumps(lost[0])}, which is required")
    return {**one, **other, "properties": properties, "required": required, "additionalProperties": False}


def _only(schema: Any, rest: frozenset[str], allowed: frozenset[str]) -> Any:
    """Return the schema of those values that are of the types in `rest`. allowed: all types that it allows."""
    if rest == allowed:
        return schema
    return {"allOf": [schema, {"type": sorted(rest)}]}


def _moved(value: Any) -> Any:
    """Return a part of a schema whose references begin at its `$defs.arguments`."""
    if isinstance(value, list):
        return [_moved(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {key: _moved(one) for key, one in value.items()}
    if isinstance(reference := made.get("$ref"), str) and reference.startswith("#"):
        made["$ref"] = f"#/$defs/arguments{reference[1:]}"
    return made


def _pattern(pattern: str, way: str) -> str:
    """Return an expression for the texts in which a pattern in llguidance's syntax matches."""
    found = []
    for one in alternatives(pattern):
        begins, ends = one.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", one) is not None
        inner = one[begins : len(one) - ends]
        if re.search(r"[$^]", _CLASS.sub("", inner)):
            raise UnsupportedSchema(way, "has an anchor in its middle, which this model's calls cannot be held to")
        found.append(f"{'' if begins else _ANY}({inner}){'' if ends else _ANY}")
    return f"/{_escaped('|'.join(found))}/"


_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")


def _escaped(pattern: str) -> str:
    """Return a pattern as it stands between slashes in Lark."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL).replace("\n", r"\n")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Texts that have the end of a value within.
_WITH_END = f"{_ANY}({'|'.join(map(_escaped, END_PATTERNS))}){_ANY}"
