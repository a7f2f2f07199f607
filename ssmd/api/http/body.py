"""JSON bodies. Of requests: strict JSON, strict types, and an error that names the parameter. Of answers: long ones."""

from __future__ import annotations

import asyncio
import codecs
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
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
MAX_VALUES = 250_000  # a conversation of 10,000 messages, each of five parts, has fewer
MAX_SHOWN_CHARS = 80
_ENTRIES = 8
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
    if kind != "application/json" and not kind.endswith("+json"):
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


def parse_object(raw: bytes, go_on: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Parse a JSON object. NaN, Infinity, lone surrogates and deep nesting are refused.

    A byte order mark before it is left out. go_on: called now and then. Raises Rejection, and the errors of `go_on`.
    """
    if (encoding := textfile.encoding(raw)) != textfile.UTF_8:
        raise Rejection(f"the request body is {encoding.upper()}; send it as UTF-8", code="invalid_json")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if too_many(raw, MAX_VALUES, b"[{,", go_on):
        raise Rejection(f"the request body has more than {MAX_VALUES} values", code="invalid_json")
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as err:
        raise Rejection(f"the request body is not valid JSON: {err}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Rejection("the request body is not a JSON object", code="invalid_json")
    return value


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


def _explain(detail: ErrorDetails) -> Rejection:
    param = ""
    for part in (*detail["loc"], *detail.get("ctx", {}).get("name", ())):
        if part != "[key]":
            param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    param = brief(param)[1:-1]
    if detail["type"] == "missing":
        return Rejection(f"{param} is required", code="missing_required_parameter", param=param)
    if detail["type"] == "extra_forbidden":
        return Rejection(f"there is no parameter {param!r} here", code="unknown_parameter", param=param)
    text = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return Rejection(f"{param}: {text} (got {brief(detail['input'])})", code="invalid_value", param=param)
