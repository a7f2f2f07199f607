"""JSON bodies. Of requests: strict JSON, strict types, and an error that names the parameter. Of answers: long ones."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import isinf
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from ssmd.engine.terms import Rejection
from ssmd.machine import textfile
from ssmd.model.defaults import whole
from ssmd.model.strict import Strict, too_many
from ssmd.sessions.turn import ID_PATTERN

READ_TIMEOUT_S = 60.0
_CURLS = "application/x-www-form-urlencoded"  # that curl sends for -d, as in the examples of Ollama's documentation
MAX_VALUES = 250_000  # a conversation of 10,000 messages, each of five parts, has fewer
MAX_SHOWN_CHARS = 80
_ENTRIES = 8
_PAIR_CHARS = 12  # length of two escapes, which stand for one character
_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")  # of half of a surrogate pair
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_SURROGATE = re.compile(r".*hex escape at line ([0-9]+) column ([0-9]+)")  # jiter's error
_WALKED = frozenset({dict, list, float})
_AT_ONCE = 64  # values of a long array that are encoded at once
Id = Annotated[str, Field(pattern=f"^{ID_PATTERN.pattern}$")]  # of a session or a turn

# The last part of an integer field's type. Clients whose language has one number type send 4.0 for 4.
WHOLE = BeforeValidator(whole)


def whole_list(value: Any) -> Any:
    """Return a list whose entries went through `whole`; other values unchanged."""
    return [*map(whole, value)] if isinstance(value, list) and float in set(map(type, value)) else value


class StrictModel(Strict):
    """A model of a request's fields: no unknown ones, no "1" for 1, no NaN and no Infinity."""

    model_config = ConfigDict(allow_inf_nan=False)


Model = TypeVar("Model", bound=StrictModel)


async def read_body(request: Request) -> bytes:
    """Return the whole body; security.py limits its size. Raises Rejection."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json") and not (kind == _CURLS and _is_for_ollama(request)):
        raise Rejection(
            f"content-type {brief(kind)} is not supported here; send application/json",
            status=415,
            code="unsupported_media_type",
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise Rejection(
            f"content-encoding {brief(coding)} is not supported here; send the body uncompressed",
            status=415,
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise Rejection(
            f"the request body did not arrive within {READ_TIMEOUT_S:.0f} s", status=408, code="body_timeout"
        ) from None


def _is_for_ollama(request: Request) -> bool:
    """Return True for a request to Ollama's API that no browser sent: those have an origin."""
    path: str = request.scope["path"]
    return path.startswith("/api/") and not {"origin", "sec-fetch-site"} & set(request.headers)


def parse_object(raw: bytes, go_on: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Parse a JSON object. NaN, Infinity, numbers beyond a float, lone surrogates and deep nesting are refused.

    A byte order mark before it is left out. go_on: called now and then. Raises Rejection, for a number or a surrogate
    with the path of its field as `param`, and the errors of `go_on`.
    """
    if (encoding := textfile.encoding(raw)) != textfile.UTF_8:
        raise Rejection(f"the request body is {encoding.upper()}; send it as UTF-8", code="invalid_json")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if too_many(raw, MAX_VALUES, b"[{,", go_on):
        raise Rejection(f"the request body has more than {MAX_VALUES} values", code="invalid_json")
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as err:
        param = _place_of_surrogate(raw, str(err))
        said = f"the text in {param} is not Unicode: {err}" if param else str(err)
        said = f"the request body is not valid JSON: {said}"
        raise Rejection(said, code="invalid_json", param=param or None) from None
    if not isinstance(value, dict):
        raise Rejection("the request body is not a JSON object", code="invalid_json")
    if (place := _place_of_infinity(value)) is not None:
        raise Rejection(f"{place} is a number beyond 1.8e308, the range of floats", code="invalid_value", param=place)
    return value


def _place_of_surrogate(raw: bytes, error: str) -> str:
    """Return the path of the text that is not Unicode, "" for another error. error: jiter's."""
    try:
        raw.decode()
        found = _SURROGATE.fullmatch(error)
        if found is None:
            return ""
        start = 0
        for _ in range(int(found[1]) - 1):
            start = raw.index(b"\n", start) + 1
        end = start + int(found[2])
        escape = _ESCAPE.search(raw, max(0, end - _PAIR_CHARS))
        at = end if escape is None else escape.start()
        if before := _FIRST_HALF.match(raw, at - _PAIR_CHARS // 2):
            at = before.start()  # not between the halves of a pair
    except UnicodeDecodeError as err:
        at = err.start
    cut = raw[:at]
    if (len(cut) - len(cut.rstrip(b"\\"))) % 2:
        cut = cut[:-1]
    try:
        value = from_json(cut, allow_partial="trailing-strings")  # up to the text, as far as it came
    except ValueError:
        return ""
    path: list[str | int] = []
    while isinstance(value, dict | list) and value:
        step = len(value) - 1 if isinstance(value, list) else next(reversed(value))
        path.append(step)
        value = value[step]
    return _param(path)


def _place_of_infinity(value: dict[str, Any]) -> str | None:
    """Return the path of a number that no float holds; None without one. JSON allows 1e400, which is parsed as inf."""
    left: list[Any] = [value]
    while left:
        one = left.pop()
        if type(one) is list and _WALKED.isdisjoint(map(type, one)):
            continue  # most long lists
        for inner in one.values() if type(one) is dict else one:
            kind = type(inner)
            if kind is dict or kind is list:
                left.append(inner)
            elif kind is float and isinf(inner):
                return _param(_way(value) or ())
    return None


def _way(value: Any) -> list[str | int] | None:
    """Return the keys and indices that lead to the first infinite number in a value; None without one."""
    if isinstance(value, float):
        return [] if isinf(value) else None
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        if (more := _way(inner)) is not None:
            return [step, *more]
    return None


def validate(model: type[Model], fields: dict[str, Any]) -> Model:
    """Read the fields into the model. Raises Rejection that names the first wrong field."""
    try:
        return model.model_validate(fields)
    except ValidationError as err:
        raise _explain(err.errors(include_url=False)[0]) from None


def object_with(name: str, values: Sequence[Any], fields: Mapping[str, Any] | None = None) -> bytes:
    """Encode a JSON object: `fields`, and then a long array. Other threads run meanwhile, as they cannot while one
    encodes.
    """
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
    parts = [encode(values[i : i + _AT_ONCE])[1:-1] for i in range(0, len(values), _AT_ONCE)]
    before = f"{encode(fields)[1:-1]}," if fields else ""
    return f"{{{before}{encode(name)}:[{','.join(parts)}]}}".encode()


def brief(value: object) -> str:
    """Format a client's value for an error message, cut to a sensible length."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


class _Short(reprlib.Repr):
    """Formats a value for `brief`: short values whole, long ones only as far as they are shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist = 4, _ENTRIES
        self.maxother = self.maxlong = MAX_SHOWN_CHARS

    def repr_str(self, value: str, level: int) -> str:
        return repr(value[: MAX_SHOWN_CHARS + 1])

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{…}"
        pairs = (f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in islice(value.items(), _ENTRIES))
        return "{" + ", ".join(pairs) + (", …}" if len(value) > _ENTRIES else "}")


_SHORT = _Short()


def _param(path: Iterable[str | int]) -> str:
    """Write a path of keys and indices as a parameter: `messages[0].content`."""
    param = ""
    for part in path:
        if part != "[key]":
            param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    return brief(param)[1:-1]


def _explain(detail: ErrorDetails) -> Rejection:
    param = _param((*detail["loc"], *detail.get("ctx", {}).get("name", ())))
    if detail["type"] == "missing":
        return Rejection(f"{param} is required", code="missing_required_parameter", param=param)
    if detail["type"] == "extra_forbidden":
        return Rejection(f"there is no parameter {param!r} here", code="unknown_parameter", param=param)
    text = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return Rejection(f"{param}: {text} (got {brief(detail['input'])})", code="invalid_value", param=param)
