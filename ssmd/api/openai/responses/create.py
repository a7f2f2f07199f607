"""/v1/responses: OpenAI's responses, answered whole or as a stream of events; and the tokens of their prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ssmd.api.generate.answer import ParsedRequest, Read
from ssmd.api.http.access import caller_of
from ssmd.api.openai.fields import Fields
from ssmd.api.openai.responses.answer import ResponseAnswer, ResponseForm, encoded
from ssmd.api.openai.responses.background import Receipts
from ssmd.api.openai.responses.body import (
    REFUSED,
    ResponseRequest,
    ResponsesBody,
    read_response,
    to_request,
    variables_of,
)
from ssmd.api.openai.responses.state import History, facts_of, stored_events
from ssmd.api.openai.responses.tools import ResponseTools
from ssmd.api.openai.tokenize import MAX_TOKENS, TextEndpoints
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.engine import Engine
from ssmd.engine.host.host import Host
from ssmd.engine.terms import Rejection
from ssmd.sessions.turn import Domain

MAX_KEPT_CHARS = 1 << 20  # of a stored response's echo, in JSON: the event loop writes it while the answer is under way


def endpoint(on: Service) -> Endpoint:
    """Build the endpoint of responses."""
    fields = Fields(ResponsesBody.model_fields, REFUSED, strict=on.settings.strict)
    truncate, keep_volatile = on.settings.truncation == "auto", on.settings.keep_volatile

    def read_for(domain: Domain) -> Read:
        history = History(None if on.store is None else on.store.of(domain))
        receipts = None if on.store is None else Receipts(on, on.store.of(domain), stored_events)
        return partial(_read, on.host, history, receipts, fields, truncate, keep_volatile)

    return on.front_for(read_for)


class InputTokens(TextEndpoints):
    """The endpoint that counts a prompt's tokens."""

    def __init__(self, on: Service) -> None:
        super().__init__(on)
        self._fields = Fields(ResponsesBody.model_fields, REFUSED, strict=on.settings.strict)
        self._keeps, self._store = on.settings.keep_volatile, on.store

    async def count(self, http: HttpRequest) -> Response:
        """Answer with the number of tokens of a prompt, beyond the model's context too."""
        domain = caller_of(http.scope).domain

        def work(body: ResponsesBody, engine: Engine, go_on: Callable[[], None]) -> bytes:
            unread: set[str] = set()
            dropped = None if self._keeps else set[str]()
            history = History(None if self._store is None else self._store.of(domain))
            vocabulary = engine.artifact.manifest.vocabulary
            asked = to_request(body, vocabulary, {}, unread, dropped=dropped, history=history)
            self._fields.named(unread)
            try:
                tokens = engine.count(asked.request, MAX_TOKENS, go_on)
            except Rejection as err:
                raise _placed(asked.tools, err) from None
            return json.dumps({"object": "response.input_tokens", "input_tokens": tokens}).encode()

        return await self.answer(http, self._fields, read_response, work)


def _read(
    host: Host,
    history: History,
    receipts: Receipts | None,
    sorting: Fields,
    truncate: bool,
    keep_volatile: bool,
    fields: dict[str, Any],
) -> ParsedRequest:
    """Read a body's fields. receipts: None without a store. truncate, keep_volatile: the settings. Raises Rejection."""
    fields, ignored = sorting.sort(fields)
    body = read_response(fields)
    model = host.shelf.find(body.model)
    unread: set[str] = set()
    dropped: set[str] = set()
    asked = to_request(
        body,
        model.manifest.vocabulary,
        model.defaults,
        unread,
        truncate=truncate,
        dropped=None if keep_volatile else dropped,
        history=history,
    )
    request, echo = asked.request, encoded(asked.echo)
    keywords = asked.tools.not_enforced(request.tool_choice)
    if request.grammar is not None and request.tool_choice.mode != "required":
        keywords += request.grammar.ignored
    ignored = (*ignored, *sorting.named(unread), *sorting.not_enforced(keywords))
    form = ResponseForm(
        model=model.named(body.model),
        echo=asked.echo,
        store=request.store,
        origins=asked.tools.origins or {},
        encrypts=asked.encrypts,
    )
    if asked.conversation is not None and not (request.store and host.keeps):
        said = "conversation: a response with store: false is not kept, so it cannot be added; leave store out"
        raise Rejection(said, code="invalid_value", param="store")
    if body.background and not (request.store and receipts is not None):
        why = "leave store out" if receipts is not None else "this daemon runs with --no-store; leave background out"
        said = f"background: true needs store: true, as the response is retrieved later; {why}"
        raise Rejection(said, code="invalid_value", param="background")
    if request.store:
        facts = facts_of(form, instructed=asked.instructed)
        if asked.conversation is not None:
            facts["conversation"] = _place(asked, body.input)
        if len(echo) > MAX_KEPT_CHARS and len(encoded(facts["echo"])) > MAX_KEPT_CHARS:
            said = f"text and tool_choice have more than {MAX_KEPT_CHARS} characters, which a stored response keeps"
            raise Rejection(f"{said}; send store: false", code="invalid_value", param="text")
        if body.background:
            request, facts["cuts"] = replace(request, created=int(time.time())), []
        request = replace(request, facts=facts)
    written = partial(ResponseAnswer, form, echo)
    return ParsedRequest(
        model,
        request,
        stream=bool(body.stream),
        answer=written,
        followed=written,
        background=bool(body.background),
        receipt=receipts.of(written) if body.background and receipts is not None else None,
        keep_alive_s=body.keep_alive,
        ignored=ignored,
        dropped=tuple(sorted(dropped)),
        variables=variables_of(body),
        placed=partial(_placed, asked.tools),
        named=sorting.named,
        check=None if asked.conversation is None else partial(history.check, asked.conversation),
    )


def _place(asked: ResponseRequest, given: Any) -> dict[str, Any]:
    """Return the place of a response in its conversation, as its facts keep it."""
    assert asked.conversation is not None
    own = asked.given - (asked.request.messages[-1].role == "assistant")  # a beginning of the answer is part of that
    results = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
    custom = [item["call_id"] for item in results if item.get("type") == "custom_tool_call_output"]
    return {"id": asked.conversation.id, "entry": asked.conversation.entries + 1, "given": own, "custom": custom}


def _placed(tools: ResponseTools, error: Rejection) -> Rejection:
    """Return an error of the engine with its place in the body: the conversation is `input` here."""
    if error.param == "messages":
        return Rejection(
            error.message, status=error.status, code=error.code, param="input", retry_after_s=error.retry_after_s
        )
    return tools.placed(error)
