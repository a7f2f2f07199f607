"""/tokenize, /detokenize and /apply-template: text to ids and back, as in llama.cpp's server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.api.http.body import StrictModel, parse_object, read_body, validate, whole_list
from ssmd.api.http.errors import IGNORED
from ssmd.api.http.keys import caller_of
from ssmd.api.openai.chat_body import NOT_BUILT, ChatBody, read_chat, to_request
from ssmd.api.openai.fields import Fields
from ssmd.engine.engine import Engine
from ssmd.engine.host.host import Host
from ssmd.engine.host.models import Model
from ssmd.engine.terms import Rejection

MAX_TOKENS = 250_000
T = TypeVar("T")
Name = Annotated[str, Field(min_length=1, max_length=4096)]


class TokenizeBody(StrictModel):
    model: Name | None = None
    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(StrictModel):
    model: Name | None = None
    tokens: Annotated[list[int], Field(fail_fast=True, max_length=MAX_TOKENS), BeforeValidator(whole_list)]


def routes(host: Host, *, strict: bool = False) -> list[Route]:
    """Return the endpoints, for `app.create_app`. strict: the setting."""
    words = _Endpoints(host, strict=strict)
    return [
        Route("/tokenize", words.tokenize, methods=["POST"]),
        Route("/detokenize", words.detokenize, methods=["POST"]),
        Route("/apply-template", words.apply_template, methods=["POST"]),
    ]


class _Endpoints:
    def __init__(self, host: Host, *, strict: bool) -> None:
        self._host = host
        self._fields: dict[type[StrictModel], Fields] = {
            model: Fields(model.model_fields, NOT_BUILT if model is ChatBody else {}, strict=strict)
            for model in (TokenizeBody, DetokenizeBody, ChatBody)
        }

    async def tokenize(self, http: HttpRequest) -> JSONResponse:
        """Answer with the ids of a text. with_pieces: also the text of each, or its bytes for a part of a character."""
        fields, ignored = await self._sorted(TokenizeBody, http)
        body = validate(TokenizeBody, fields)

        def work(engine: Engine) -> dict[str, Any]:
            words = engine.words
            ids = words.ids(
                body.content,
                begin=bool(body.add_special),
                controls=body.parse_special is not False,
                param="content",
                at_most=MAX_TOKENS,
            ).tolist()
            if len(ids) > MAX_TOKENS:
                said = f"content comes to more than {MAX_TOKENS} tokens; send it in parts"
                raise Rejection(said, code="invalid_value", param="content")
            if not body.with_pieces:
                return {"tokens": ids}
            return {"tokens": [{"id": token, "piece": _piece(words.piece(token))} for token in ids]}

        return await self._answer(http, body.model, work, ignored)

    async def detokenize(self, http: HttpRequest) -> JSONResponse:
        """Answer with the text of ids."""
        fields, ignored = await self._sorted(DetokenizeBody, http)
        body = validate(DetokenizeBody, fields)

        def work(engine: Engine) -> dict[str, Any]:
            return {"content": engine.words.written(engine.words.checked(body.tokens, "tokens").tolist())}

        return await self._answer(http, body.model, work, ignored)

    async def apply_template(self, http: HttpRequest) -> JSONResponse:
        """Answer with the prompt's text that the template renders from a chat's messages."""
        fields, ignored = await self._sorted(ChatBody, http)
        name = fields.get("model")
        model = await asyncio.to_thread(self._find, name) if name is None else None
        body = read_chat(fields | ({} if model is None else {"model": model.id}))

        def work(engine: Engine) -> dict[str, Any]:
            request = to_request(body, engine.artifact.manifest.vocabulary)
            return {"prompt": engine.rendered(replace(request, store=False, domain=caller_of(http.scope).domain))}

        return await self._answer(http, body.model, work, ignored)

    async def _sorted(self, model: type[StrictModel], http: HttpRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
        raw = await read_body(http)
        return await asyncio.to_thread(lambda: self._fields[model].sort(parse_object(raw)))

    async def _answer(
        self,
        http: HttpRequest,
        name: str | None,
        work: Callable[[Engine], Mapping[str, Any]],
        ignored: tuple[str, ...],
    ) -> JSONResponse:
        """Answer with the result of `work`, run in a thread once the model is loaded. Raises Rejection."""
        future = self._host.lend(await asyncio.to_thread(self._find, name))
        try:
            lease = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._host.give_up(future)
            raise
        try:
            found = await asyncio.to_thread(work, lease.engine)
        finally:
            lease.release()
        return JSONResponse(found, headers={IGNORED: ", ".join(ignored)} if ignored else {})

    def _find(self, name: str | None) -> Model:
        """Return the model of that name; without a name the only one there is, or the one loaded. Raises Rejection."""
        if name is not None:
            return self._host.shelf.find(name)
        names = sorted({model.name for model in self._host.shelf.models() if model.found.manifest is not None})
        if len(names) == 1:
            return self._host.shelf.find(names[0])
        foremost = self._host.foremost()
        if foremost is None:
            raise Rejection(
                f"model is required: this daemon serves {', '.join(names) or 'none'}, and none of them is loaded",
                code="missing_required_parameter",
                param="model",
            )
        return foremost


def _piece(utf8: bytes) -> str | list[int]:
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return list(utf8)
