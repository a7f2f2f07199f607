"""/tokenize, /detokenize and /apply-template: text to ids and back, as in llama.cpp's server."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ssmd.api.generate.answer import ClientGone, Delivery, watched
from ssmd.api.generate.fair_reading import client_of
from ssmd.api.http.access import caller_of
from ssmd.api.http.body import StrictModel, object_with, parse_object, read_body, validate, whole_list
from ssmd.api.http.errors import IGNORED
from ssmd.api.openai.chat import NOT_BUILT, ChatBody, read_chat, to_request
from ssmd.api.openai.fields import Fields
from ssmd.api.operation import Service
from ssmd.engine.engine import Engine
from ssmd.engine.host.loader import ModelLease
from ssmd.engine.host.models import Model
from ssmd.engine.terms import Rejection

log = logging.getLogger(__name__)
MAX_TOKENS = 250_000
CLIENT_GONE = 499  # in the access log, for a client that left before its answer
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


class NamesModel(Protocol):
    """A body that names a model, or leaves that to the daemon."""

    @property
    def model(self) -> str | None: ...


Body = TypeVar("Body", bound=NamesModel)


class TextEndpoints:
    """Endpoints that answer from a loaded model's template and tokenizer, without its program."""

    def __init__(self, on: Service) -> None:
        self._host, self._pool = on.host, on.pool

    async def answer(
        self,
        http: HttpRequest,
        known: Fields,
        read: Callable[[dict[str, Any]], Body],
        work: Callable[[Body, Engine, Callable[[], None]], bytes],
    ) -> Response:
        """Answer with the result of `work`, run once the model is loaded. Raises Rejection.

        known: of the body. read: makes the body of its fields. Both run in the client's turn, if it is still there.
        """
        raw, client = await read_body(http), client_of(http)

        def begin(go_on: Callable[[], None]) -> tuple[Body, Model, tuple[str, ...]]:
            fields, ignored = known.sort(parse_object(raw, go_on))
            body = read(fields)
            return body, self.find(body.model), ignored

        try:
            async with watched(http.receive) as delivery:
                body, model, ignored = await self._pool.run(partial(begin, delivery.check), client, len(raw), delivery)
                lease = await self._lend(model, delivery)
                try:
                    mine = partial(work, body, lease.engine, delivery.check)
                    found = await self._pool.run(mine, client, len(raw), delivery)
                finally:
                    lease.release()
        except ClientGone:
            log.info("%s: the client went away", http.scope["path"])
            return Response(status_code=CLIENT_GONE)
        return Response(found, headers={IGNORED: ", ".join(ignored)} if ignored else {}, media_type="application/json")

    async def _lend(self, model: Model, delivery: Delivery) -> ModelLease:
        """Return a lease of the model, once it is loaded. Raises Rejection, and ClientGone if the client leaves."""
        future = self._host.lend(model)
        try:
            await delivery.unless_done(future)
        except BaseException:
            self._host.give_up(future)
            raise
        return future.result()

    def find(self, name: str | None) -> Model:
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


class Texts:
    """The handlers."""

    def __init__(self, on: Service) -> None:
        self._texts, self._keeps = TextEndpoints(on), on.settings.keep_volatile
        self._fields: dict[type[StrictModel], Fields] = {
            model: Fields(model.model_fields, NOT_BUILT if model is ChatBody else {}, strict=on.settings.strict)
            for model in (TokenizeBody, DetokenizeBody, ChatBody)
        }

    async def tokenize(self, http: HttpRequest) -> Response:
        """Answer with the ids of a text. with_pieces: also the text of each, or its bytes for a part of a character."""

        def work(body: TokenizeBody, engine: Engine, go_on: Callable[[], None]) -> bytes:
            words = engine.words
            many = words.fewest(body.content, MAX_TOKENS) > MAX_TOKENS
            ids: list[int] = []
            if not many:
                ids = words.ids(
                    body.content,
                    begin=bool(body.add_special),
                    controls=body.parse_special is not False,
                    param="content",
                    at_most=MAX_TOKENS,
                    go_on=go_on,
                ).tolist()
            if many or len(ids) > MAX_TOKENS:
                said = f"content comes to more than {MAX_TOKENS} tokens; send it in parts"
                raise Rejection(said, code="invalid_value", param="content")
            if not body.with_pieces:
                return object_with("tokens", ids)
            return object_with("tokens", [{"id": token, "piece": _piece(words.piece(token))} for token in ids])

        return await self._texts.answer(http, self._fields[TokenizeBody], partial(validate, TokenizeBody), work)

    async def detokenize(self, http: HttpRequest) -> Response:
        """Answer with the text of ids."""

        def work(body: DetokenizeBody, engine: Engine, go_on: Callable[[], None]) -> bytes:
            text = engine.words.written(engine.words.checked(body.tokens, "tokens").tolist())
            return json.dumps({"content": text}, ensure_ascii=False, separators=(",", ":")).encode()

        return await self._texts.answer(http, self._fields[DetokenizeBody], partial(validate, DetokenizeBody), work)

    async def apply_template(self, http: HttpRequest) -> Response:
        """Answer with the prompt's text that the template renders from a chat's messages."""

        def read(fields: dict[str, Any]) -> ChatBody:
            named = {"model": self._texts.find(None).id} if fields.get("model") is None else {}
            return read_chat(fields | named)

        def work(body: ChatBody, engine: Engine, go_on: Callable[[], None]) -> bytes:
            request = to_request(body, engine.artifact.manifest.vocabulary, dropped=None if self._keeps else set())
            prompt = engine.rendered(replace(request, store=False, domain=caller_of(http.scope).domain))
            return json.dumps({"prompt": prompt}, ensure_ascii=False, separators=(",", ":")).encode()

        return await self._texts.answer(http, self._fields[ChatBody], read, work)


def _piece(utf8: bytes) -> str | list[int]:
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return list(utf8)
