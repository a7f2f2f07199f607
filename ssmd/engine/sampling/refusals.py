"""llguidance's errors for a JSON schema: the place of what it refuses, and one line for the client."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from ssmd.text.schemas import step

SHOWN = 300  # characters of llguidance's error in a message
_MAX_PARTS = 64  # parts of a schema that are read one by one to find the wrong one
_KEYWORD = re.compile(r'^Unimplemented keys: \["([^"]+)"')
_VALUE = re.compile(r"^(?:Unknown (format)|Invalid (type)): (.*)$")
_REFERENCE = re.compile(r"^(?:Pointer|Resource) '([^']*)'")
_EXPECTED = re.compile(r"^Expected .* for '(\w+)'(?: item)?, got (.*)$")
_MULTIPLE = re.compile(r"^(?:Value for 'multipleOf' has too many digits|invalid multiple of)")
_LEAST_MULTIPLE = 1e-6  # llguidance reads those from here on
_KIND = re.compile(r"^(\$?\w+) must be an? (array|object|string)")
_GREATER = re.compile(r"(min\w+) \((\d+)\) is greater than max")
_ONE_OF = "oneOf constraints are not supported"
_COUNTED = "min/maxProperties only supported"
_REGEX = re.compile(r"^regex parse error:.*error: (.*)$", re.DOTALL)
_ANCHOR = re.compile(r"^lookarounds not supported")
_UNDECIDED = "Unable to determine if regex is empty"
_NO_SCHEMA = "schema must be an object or boolean"
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "prefixItems", "allOf", "anyOf", "oneOf")
# Keywords whose cost does not follow from their length.
_COSTLY = {"pattern", "patternProperties", "multipleOf", "allOf", "oneOf"}
_OF_SCHEMA = re.compile(r'\.(?:properties|patternProperties|\$defs|definitions)(?:\.[\w$]+|\["[^"]*"\])$')
_KINDS: dict[str, type] = {"array": list, "object": dict, "string": str}

Keywords = Iterable[tuple[str, str, Any]]  # each keyword of a schema: (its path, the keyword, its value)


def worded(why: str) -> str:
    """Return llguidance's error as one line."""
    if found := _REGEX.match(why):
        why = f"it is not a regular expression that can be enforced: {found[1]}"
    elif why.startswith(_ONE_OF):
        why = "a value may be valid by two of these schemas; use anyOf, or tell them apart by a required const"
    elif why.startswith(_UNDECIDED):
        why = "these patterns are too costly together; use fewer or simpler ones"
    elif "fuel exhausted" in why:
        why = "it is too costly to read; use shorter lengths, and fewer or simpler patterns"
    elif _MULTIPLE.match(why):
        why = f"it is 0, or below {_LEAST_MULTIPLE:g} with more digits than can be enforced"
    elif "Regex is empty" in why:
        why = "no text fits it"
    why = why.replace("Expected f64", "Expected a number")
    why = why.replace("Unsatisfiable schema:", "no value is valid by it:")
    why = " ".join(why.replace("<non-verbose/>", "").replace("NoExtensionBias", "no text fits it").split())
    return why[:SHOWN]


def place_of(keywords: Keywords, why: str) -> str:
    """Return the path of the keyword that llguidance refuses, "" if that is unknown. why: llguidance's error."""
    wanted = _wanted(why)
    if _NO_SCHEMA in why:
        return next((place for way, key, value in keywords if (place := _no_schema(way, key, value))), "")
    return "" if wanted is None else next((way for way, key, value in keywords if wanted(key, value)), "")


def place_of_cost(schema: Any, way: str = "") -> str:
    """Return the path of the innermost part that holds all that can be costly in a schema, "" if nothing can."""
    if isinstance(schema, list):
        parts = [(f"{way}[{i}]", "", one) for i, one in enumerate(schema)]
    else:
        parts = [(way + step(key), key, one) for key, one in schema.items()] if isinstance(schema, dict) else []
    found = [
        place for inner, key, one in parts if (place := inner if _is_costly(key, one) else place_of_cost(one, inner))
    ]
    return found[0] if len(found) == 1 else way if found else ""


def _is_costly(keyword: str, value: Any) -> bool:
    return keyword in _COSTLY and (keyword == "patternProperties" or not isinstance(value, dict))


def _no_schema(way: str, keyword: str, value: Any) -> str:
    """Return the path of the first value that should be a schema and is not; "" if all are."""
    if isinstance(value, list) and keyword in _SCHEMAS:
        return next((f"{way}[{i}]" for i, one in enumerate(value) if not isinstance(one, dict | bool)), "")
    return way if (keyword in _SCHEMAS or _OF_SCHEMA.search(way)) and not isinstance(value, dict | bool) else ""


def _wanted(why: str) -> Callable[[str, Any], bool] | None:
    """Return a test for the keyword and value that llguidance's error names; None if it names none."""
    if found := _KEYWORD.search(why):
        name = found[1]
        return lambda keyword, value: keyword == name
    if found := _VALUE.search(why):
        name, said = found[1] or found[2], found[3]
        return lambda keyword, value: keyword == name and (value == said or (isinstance(value, list) and said in value))
    if found := _REFERENCE.search(why):
        said = found[1]
        return lambda keyword, value: keyword == "$ref" and str(value).lstrip("#") == said
    if found := _EXPECTED.search(why) or _GREATER.search(why):
        name, said = found[1], found[2]
        return lambda keyword, value: keyword == name and (json.dumps(value) == said or _has(value, said))
    if _MULTIPLE.search(why):
        return lambda keyword, value: (
            keyword == "multipleOf" and isinstance(value, int | float) and abs(value) < _LEAST_MULTIPLE
        )
    if found := _KIND.search(why):
        name, kind = found[1], _KINDS[found[2]]
        return lambda keyword, value: keyword == name and not isinstance(value, kind)
    if _ONE_OF in why or _COUNTED in why:
        names = ("oneOf",) if _ONE_OF in why else ("minProperties", "maxProperties")
        return lambda keyword, value: keyword in names
    return None


def _has(value: Any, text: str) -> bool:
    """Return True if an item of a list is written like this in JSON."""
    return isinstance(value, list) and any(json.dumps(one) == text for one in value)


def parts_of(schema: Any, keywords: Keywords, why: str) -> Iterator[tuple[str, Any]]:
    """Yield parts of a schema that may be what llguidance refuses: (path, schema). Each can be read by itself."""
    if not isinstance(schema, dict) or schema.get("type") == ["string"]:  # such a part itself
        return iter(())
    if _REGEX.match(why) or _ANCHOR.match(why):
        patterns = ((way, value) for way, key, value in keywords if key == "pattern" and isinstance(value, str))
        return islice(((way, {"type": ["string"], "pattern": one}) for way, one in patterns), _MAX_PARTS)
    found = _needed(schema) if "Unsatisfiable" in why or why.startswith(_UNDECIDED) else ()
    return islice(((way, one) for way, one in found if '"$ref"' not in json.dumps(one)), _MAX_PARTS)


def _needed(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts without whose values the schema has none."""
    if isinstance(many := schema.get("allOf"), list):
        yield from ((f".allOf[{i}]", one) for i, one in enumerate(many))
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        names = [name for name in required if isinstance(name, str) and name in properties]
        yield from ((f".properties{step(name)}", properties[name]) for name in names)
    if isinstance(least := schema.get("minItems"), int) and least and "items" in schema:
        yield ".items", schema["items"]
