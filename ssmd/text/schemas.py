"""JSON schemas as llguidance can enforce them, and the places of keywords that it cannot.

Writers such as zod and pydantic add keywords that forbid nothing, or that only annotate. llguidance refuses both. Here
the first are left out. The second are left out and reported. A keyword that decides an answer's shape and cannot be
enforced is an error with its place.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from ssmd.text.closed import closed, names_all
from ssmd.text.patterns import is_read, translated

MAX_KEYS = 10_000  # keys of all objects together
MAX_PATTERN_CHARS = 16 << 10  # characters of all patterns: the time to read one grows faster than its length
# Bounds of numbers. llguidance reads them as floats, and near the least integer of 64 bits it ends the process.
LEAST, MOST = -(1 << 62), 1 << 62
MAXIMUM = (1 << 63) - 1  # largest signed 64-bit integer, a common `maximum`; llguidance reads it as this number

# The formats that llguidance knows.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalItems", "additionalProperties", "propertyNames")
_APPLYING = frozenset({*_NAMED, *_LISTED, *_ALONE})
_JOINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ENCODINGS = ("contentEncoding", "contentMediaType", "contentSchema")
_OF_NAMES = frozenset({"pattern", "minLength", "maxLength", "format"})  # keywords of names that become a pattern
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# Keywords that llguidance does not enforce, each with a way to say the same.
_ADVICE = {
    "not": "name the types or values that are allowed",
    "if": "use anyOf with a schema for each case",
    "contains": "use items, or name the values with enum",
    "dependentRequired": "list the properties in required, or use anyOf",
    "dependentSchemas": "use anyOf with a schema for each case",
    "dependencies": "list the properties in required, or use anyOf",
    "propertyNames": "name the properties, or use one pattern for their names",
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_ANNOTATIONS = frozenset({
    *("$anchor", "$comment", "$defs", "$id", "$schema", "definitions", "default", "deprecated", "description"),
    *("example", "examples", "id", "readOnly", "title", "writeOnly"),
})  # fmt: skip
# Keywords by which a schema forbids a value.
_CONSTRAINTS = frozenset({
    *("type", "enum", "const", "format", "pattern", "multipleOf", "required", "uniqueItems", "then", "else"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minContains", "maxContains"),
    *_COUNTS, *_ADVICE,
    *("properties", "patternProperties", "$ref", *_LISTED, *_ALONE),
})  # fmt: skip
# Keywords that llguidance enforces in any form, annotations, and those whose parts are all that has to be read.
_SIMPLE = _ANNOTATIONS - {"$schema"} | {
    *(
        "type",
        "enum",
        "const",
        "required",
        "$ref",
        "properties",
        "items",
        "additionalProperties",
        "anyOf",
        "prefixItems",
    ),
}
_DIALECT = re.compile(r"https?://json-schema\.org/draft(-0[3467]/schema#?|/20(19-09|20-12)/schema#?)")
_KEY = re.compile(r"[\w$]+")
_MAX_STEPS = 12  # references followed one after the other
_MAX_COMPARED = 50_000  # parts of a schema that are looked at to compare the alternatives of its `oneOf`s

Schema = dict[str, Any]


class UnsupportedSchema(ValueError):
    """A schema that cannot be enforced. way: the path of the keyword in the schema, such as `.items.not`."""

    def __init__(self, way: str, why: str) -> None:
        super().__init__(f"{way} {why}".lstrip())
        self.way, self.why = way, why


@dataclass(frozen=True)
class EnforceableSchema:
    """A schema for llguidance. ignored: paths of keywords of the original schema that it does not enforce."""

    schema: Any
    ignored: tuple[str, ...]


def enforceable(schema: Any) -> EnforceableSchema:
    """Return a schema whose answers are valid by `schema`, except for the keywords that it reports as ignored.

    A schema that llguidance enforces as it is comes back equal. Raises UnsupportedSchema.
    """
    reader = _Reader(schema)
    found = reader.read(schema, "")
    if found is False:
        raise UnsupportedSchema(reader.why[""], "allows no value")
    reader.require_tags(found)
    return EnforceableSchema(found, tuple(reader.ignored))


def step(key: str) -> str:
    """Return a key as a step of a path: `.name`, or `["a name"]` if it has other characters."""
    return f".{key}" if _KEY.fullmatch(key) else f"[{json.dumps(key)}]"


def resolve(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a reference points to; None if no path from the root leads there."""
    found = schema if reference.startswith("#/") or reference == "#" else None
    if found is not None and reference != "#":
        for part in unquote(reference[2:]).split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(key)
            elif isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
    return found


class _Reader:
    """Reads one schema. ignored: as in an EnforceableSchema. why: what forbids all values, by path of a part."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._keys, self._pattern_chars = 0, 0
        self._tags: list[tuple[str, str]] = []  # references to objects, each with a property that they require
        self.ignored: list[str] = []
        self.why: dict[str, str] = {}

    @cached_property
    def _compare(self) -> _Comparison:
        return _Comparison(self._root)

    def read(self, schema: Any, way: str) -> Any:
        """Return a schema or a part of one without what llguidance refuses; False if nothing is valid by it."""
        if not isinstance(schema, dict):
            if schema is False:
                self.why[way] = way
            return schema
        self._keys += len(schema)
        if self._keys > MAX_KEYS:
            raise UnsupportedSchema("", f"has more than {MAX_KEYS} keys")
        if "not" in schema and allows_all(schema["not"]):
            self.why[way] = f"{way}.not"
            return False
        without_values = len(self.why)
        made = {key: self._part(key, one, way) if key in _APPLYING else one for key, one in schema.items()}
        if _SIMPLE.issuperset(made) and len(self.why) == without_values:
            return made
        _drop_empty(made)
        _narrow(made)
        if (none := self._without_values(made, way)) is not None:
            self.why[way] = self.why.get(none, none)
            return False
        self._string(made, way)
        self._array(made, way)
        self._object(made, way)
        self._exclusive(made, way)
        for key, advice in _ADVICE.items():
            if key in made:
                raise UnsupportedSchema(way + step(key), f"is not supported; {advice}")
        return made

    def _part(self, key: str, value: Any, way: str) -> Any:
        if key in _NAMED and isinstance(value, dict):
            return {name: self.read(one, f"{way}.{key}{step(name)}") for name, one in value.items()}
        if (key in _LISTED or key == "items") and isinstance(value, list):
            return [self.read(one, f"{way}.{key}[{i}]") for i, one in enumerate(value)]
        return self.read(value, f"{way}.{key}") if key in _ALONE and isinstance(value, dict) else value

    def _without_values(self, made: Schema, way: str) -> str | None:
        """Return the path of what forbids all values of a schema whose parts were read; None if it has values."""
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(many := made.get(key), list) and many:
                dead = [f"{way}.{key}[{i}]" for i, one in enumerate(many) if one is False]
                if dead and (key == "allOf" or len(dead) == len(many)):
                    return dead[0]
        properties, required = made.get("properties"), made.get("required")
        if isinstance(properties, dict) and isinstance(required, list) and made.get("type") == "object":
            names = (name for name in required if isinstance(name, str) and properties.get(name) is False)
            return next((f"{way}.properties{step(name)}" for name in names), None)
        return None

    def _ignore(self, made: Schema, key: str, way: str) -> None:
        del made[key]
        self.ignored.append(way + step(key))

    def _string(self, made: Schema, way: str) -> None:
        """Translate a pattern to llguidance's syntax. Ignore it if it has no equivalent, and formats without one."""
        if "string" not in types_of(made):
            return
        self.ignored += [way + step(key) for key in _ENCODINGS if key in made]  # llguidance ignores them
        if isinstance(format_ := made.get("format"), str) and format_ not in FORMATS:
            self._ignore(made, "format", way)
        if isinstance(pattern := made.get("pattern"), str):
            if (written := self._translated(pattern, f"{way}.pattern")) is None:
                self._ignore(made, "pattern", way)
            else:
                made["pattern"] = written

    def _translated(self, pattern: str, way: str) -> str | None:
        self._pattern_chars += len(pattern)
        if self._pattern_chars > MAX_PATTERN_CHARS:
            raise UnsupportedSchema(way, f"has patterns of more than {MAX_PATTERN_CHARS} characters up to here")
        return translated(pattern)

    def _of_names(self, pattern: str | None, way: str) -> str:
        """Return the pattern of properties' names in llguidance's syntax. pattern: translated."""
        if pattern is None or not is_read(pattern):
            why = "is not a regular expression that can be enforced; for names there is no look-around"
            raise UnsupportedSchema(way, why)
        return pattern

    def _array(self, made: Schema, way: str) -> None:
        if made.get("uniqueItems") is True:
            if isinstance(most := made.get("maxItems"), int) and most <= 1:
                del made["uniqueItems"]
            else:
                self._ignore(made, "uniqueItems", way)
        if made.get("unevaluatedItems") is False and not any(key in made for key in _JOINING):
            del made["unevaluatedItems"]
            made.setdefault("additionalItems" if isinstance(made.get("items"), list) else "items", False)

    def _object(self, made: Schema, way: str) -> None:
        """Write keywords of an object as others that mean the same."""
        if made.get("unevaluatedProperties") is False:
            joins = any(key in made for key in _JOINING)
            names = self._names(made, 0) if joins else {}
            if names is not None:
                del made["unevaluatedProperties"]
                if joins:
                    made["properties"] = {**dict.fromkeys(names, True), **made.get("properties", {})}
                made.setdefault("additionalProperties", False)
        if isinstance(patterns := made.get("patternProperties"), dict):
            made["patternProperties"] = found = {}
            for pattern, one in patterns.items():
                at = f"{way}.patternProperties{step(pattern)}"
                found[self._of_names(self._translated(pattern, at), at)] = one
        if "propertyNames" in made:
            self._name_properties(made, f"{way}.propertyNames")

    def _names(self, schema: Any, depth: int) -> Mapping[str, Any] | None:
        """Return the properties that a schema and the schemas it joins name; None if they depend on the value."""
        if not isinstance(schema, dict) or depth > _MAX_STEPS:
            return None
        self._compare.left -= 1
        joined = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
        if "$ref" in schema:
            joined.append(resolve(self._root, str(schema["$ref"])))
        names: dict[str, Any] = {}
        for one in joined:
            if self._compare.left < 0 or (inner := self._names(one, depth + 1)) is None:
                return None
            names |= inner
        open_ = {"patternProperties", *_JOINING} - {"allOf", "$ref"}
        if any(key in schema for key in open_) or schema.get("additionalProperties", False) is not False:
            return None
        properties = schema.get("properties", {})
        return names | properties if isinstance(properties, dict) else None

    def _name_properties(self, made: Schema, way: str) -> None:
        """Write `propertyNames` as properties, or as one pattern of their names."""
        names, required = made["propertyNames"], made.get("required", [])
        properties, others = made.get("properties", {}), made.get("additionalProperties", True)
        if isinstance(names, dict) and names.keys() & _CONSTRAINTS == {"$ref"}:  # such as an enum in $defs
            aim = resolve(self._root, str(names["$ref"]))
            if not isinstance(aim, dict) or not aim.keys() & _CONSTRAINTS <= {"type", "enum", "const", *_OF_NAMES}:
                return
            names = self.read(aim, way)
        if not isinstance(names, dict) or "string" not in types_of(names):
            names = {"enum": []}  # false: no property has a name
        if not isinstance(properties, dict) or not isinstance(required, list) or "patternProperties" in made:
            return
        rest = (names.keys() & _CONSTRAINTS) - {"type"}
        if rest and rest <= {"enum", "const"} and (values := _values(names)) is not None:
            allowed = [name for name in values if isinstance(name, str)]
            for name in map(str, required):
                if name not in allowed:
                    raise UnsupportedSchema(way, f"does not allow {json.dumps(name)}, which is required")
            made["properties"] = {name: properties.get(name, others) for name in allowed}
            made["additionalProperties"] = False
        elif not properties and rest <= _OF_NAMES:
            pattern, *lengths = (names.get(key) for key in ("pattern", "minLength", "maxLength"))
            if not isinstance(pattern, str | None) or not all(isinstance(one, int | None) for one in lengths):
                return
            if pattern is not None:
                self._of_names(pattern, f"{way}.pattern")
            if pattern is None and rest & {"minLength", "maxLength"}:
                least, most = ("" if one is None else one for one in lengths)
                pattern = f"^(?s:.{{{least or 0},{most}}})$"
                if not is_read(pattern):
                    raise UnsupportedSchema(way, f"has lengths that no name has: {least or 0} to {most or 'any'}")
                rest -= {"minLength", "maxLength"}
            self.ignored += [way + step(key) for key in sorted(rest - {"pattern"})]
            if pattern is not None:
                made["patternProperties"] = {pattern: others}
                made["additionalProperties"] = False
        elif rest:
            return
        del made["propertyNames"]

    def _exclusive(self, made: Schema, way: str) -> None:
        """Write a `oneOf` as `anyOf` if no value is valid by two of its schemas, which llguidance cannot always see.

        With a `discriminator` llguidance takes any `oneOf` for that.
        """
        many, tag = made.get("oneOf"), made.get("discriminator")
        name = tag.get("propertyName") if isinstance(tag, dict) else None
        if not isinstance(many, list) or "anyOf" in made:
            return
        compare = self._compare
        if compare.apart_in_pairs(many, follow=False):
            return
        if not compare.apart_in_pairs(many, follow=True):
            if not isinstance(name, str):
                return
            if not compare.apart_in_pairs(many, follow=True, tag=name):
                self.ignored.append(f"{way}.oneOf")
                many = []
            for one in many:
                if isinstance(one, dict) and "$ref" in one:
                    self._tags.append((str(one["$ref"]), name))
                else:
                    _require(one, name)
        made.pop("discriminator", None)  # llguidance does not take one in a schema that refers to itself
        parts = [("anyOf" if key == "oneOf" else key, value) for key, value in made.items()]
        made.clear()
        made.update(parts)

    def require_tags(self, root: Any) -> None:
        """Require the property that tells an object from the others of its `oneOf`, as OpenAPI's discriminator does."""
        for reference, name in self._tags:
            _require(resolve(root, reference), name)


def allows_all(schema: Any) -> bool:
    """Return True if a schema has no keyword that forbids a value."""
    if not isinstance(schema, dict):
        return schema is True
    constraints = schema.keys() & _CONSTRAINTS
    return not constraints or (constraints == {"not"} and _forbids_all(schema["not"]))


def _forbids_all(schema: Any) -> bool:
    return schema is False or (isinstance(schema, dict) and "not" in schema and allows_all(schema["not"]))


def types_of(schema: Any) -> frozenset[str]:
    """Return the types of the values that a schema may allow, by its own `type`."""
    kinds = schema.get("type", _TYPES) if isinstance(schema, dict) else _TYPES
    found = frozenset([kinds] if isinstance(kinds, str) else map(str, kinds) if isinstance(kinds, Sequence) else _TYPES)
    return found | {"integer"} if "number" in found else found


def _values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _drop_empty(made: Schema) -> None:
    """Leave out keywords that forbid nothing with the values or the neighbours that they have."""
    dialect = made.get("$schema")
    if isinstance(dialect, str) and not _DIALECT.fullmatch(dialect):
        del made["$schema"]
    if "not" in made and _forbids_all(made["not"]):
        del made["not"]
    if "if" not in made or all(allows_all(made.get(key, True)) for key in ("then", "else")):
        for key in ("if", "then", "else"):
            made.pop(key, None)
    least, most = made.get("minItems", 0), made.get("minContains", 1)
    counted = isinstance(least, int) and isinstance(most, int) and "maxContains" not in made
    if counted and "contains" in made and allows_all(made["contains"]):
        made["minItems"] = max(least, most)
        del made["contains"]
    if "contains" not in made or (made.get("minContains") == 0 and "maxContains" not in made):
        for key in ("contains", "minContains", "maxContains"):
            made.pop(key, None)
    required, properties = made.get("required"), made.get("properties", {})
    known = {*map(str, required)} if isinstance(required, list) else set()
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(many := made.get(key), dict) and all(
            known.issuperset(map(str, one)) if isinstance(one, list) else allows_all(one) for one in many.values()
        ):
            del made[key]
    for key in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        if key in made and allows_all(made[key]):
            del made[key]
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    if isinstance(properties, dict) and not properties.keys() <= known:  # else llguidance counts them
        least, most = made.get("minProperties"), made.get("maxProperties")
        if isinstance(least, int) and least <= len(known):
            del made["minProperties"]
        if isinstance(most, int) and most >= len(properties) and made.get("additionalProperties") is False:
            del made["maxProperties"]


def _narrow(made: Schema) -> None:
    """Write counts such as 4.0 as integers, and narrow bounds that no 64-bit integer has."""
    for key in _COUNTS:
        if isinstance(count := made.get(key), float) and count.is_integer():
            made[key] = int(count)
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = made.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        outside = bound < LEAST if "inimum" in key else bound > MOST and (key, bound) != ("maximum", MAXIMUM)
        if outside and abs(bound) >= sys.float_info.max:
            del made[key]  # every number keeps it
        elif outside:
            made[key] = LEAST if bound < 0 else MOST


def _require(schema: Any, name: str) -> None:
    required = schema.setdefault("required", []) if isinstance(schema, dict) else None
    if isinstance(required, list) and name not in required:
        schema["required"] = [*required, name]


class _Comparison:
    """Compares schemas of one root. left: number of schemas that it may still look at."""

    def __init__(self, root: Any) -> None:
        self._root, self.left = root, _MAX_COMPARED
        self._closes = closed(root) is not root

    def apart_in_pairs(self, schemas: Sequence[Any], *, follow: bool, tag: str = "") -> bool:
        """Return True if it is certain that no value is valid by two of these schemas.

        follow: follow references, and tell numbers apart; otherwise it sees no more than llguidance does.
        tag: a property to take for a required one.
        """
        self._follow = follow
        return all(self._apart(a, b, tag, 0) for i, a in enumerate(schemas) for b in schemas[:i])

    def _apart(self, a: Any, b: Any, tag: str, depth: int) -> bool:
        self.left -= 1
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict) or depth > _MAX_STEPS or self.left < 0:
            return False
        for one, other in ((a, b), (b, a)):
            if "$ref" in one:
                aim = resolve(self._root, str(one["$ref"])) if self._follow else None
                if aim is None or self._apart(aim, other, tag, depth + 1):
                    return aim is not None
            for key, enough in (("allOf", any), ("anyOf", all), ("oneOf", all)):
                parts = one.get(key)
                if not isinstance(parts, list) or not parts:
                    continue
                if enough(self._apart(part, other, tag, depth + 1) for part in parts):
                    return True
        common = _kinds(a) & _kinds(b)
        listed, others = _values(a), _values(b)
        if listed is not None and others is not None and (self._follow or not common & {"integer", "number"}):
            return not any(_is_same(one, other) for one in listed for other in others)
        return not common or (common == {"object"} and self._objects_apart(a, b, tag, depth))

    def _objects_apart(self, a: Schema, b: Schema, tag: str, depth: int) -> bool:
        needs_a, needs_b = ({*_strings(one.get("required")), *([tag] if tag else [])} for one in (a, b))
        names = needs_a | needs_b
        if any(self._apart(_property(a, name), _property(b, name), "", depth + 1) for name in names):
            return True
        if not self._closes or not names_all(a) or not names_all(b):
            return False
        # Answers have only the named properties. Each of the two needs one that the other does not name.
        a_names, b_names = a["properties"].keys(), b["properties"].keys()
        lacking = (needs_b & b_names) - a_names, (needs_a & a_names) - b_names
        return all(lacking) if self._follow else any(lacking)


def _is_same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)


def _strings(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _kinds(schema: Schema) -> frozenset[str]:
    """Return the types of the values that a schema may allow, by its `type` or by the values that it lists."""
    values = _values(schema)
    return types_of(schema) if values is None else types_of(schema) & frozenset(map(type_of, values))


def type_of(value: Any) -> str:
    """Return the type of a JSON value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _property(schema: Schema, name: str) -> Any:
    """Return the schema of a property."""
    properties = schema.get("properties", {})
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return schema.get("additionalProperties", True) if "patternProperties" not in schema else True
