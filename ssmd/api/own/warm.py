"""/ssmd/v1/warm: beginnings of prompts that are read once and kept, so that the first request need not read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field, field_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from ssmd.api.generate.answer import Answer, ParsedRequest, ResponseInfo, WholeChoice
from ssmd.api.generate.fair_reading import client_of
from ssmd.api.http.access import caller_of
from ssmd.api.http.body import validate
from ssmd.api.openai.chat import NOT_BUILT, ChatBody, to_request, without_refused
from ssmd.api.openai.fields import Fields
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.host.host import Host
from ssmd.engine.request import Beginning, Delta, FinishReason, Request, Usage
from ssmd.engine.terms import Rejection
from ssmd.sessions.rows.warm import WarmBeginning
from ssmd.sessions.turn import StoreError, title_problem

UNNAMED = "warm beginning"


class WarmBody(ChatBody):
    """A chat's body, of which tools and system messages count, or a stored session in place of its messages.

    idle: read it when no request waits. key: name of the API key whose requests it is for; by the daemon's own user.
    """

    messages: Any = None
    name: str | None = None
    idle: bool = False
    key: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None

    @field_validator("name")
    @classmethod
    def _is_a_title(cls, name: str | None) -> str | None:
        if name is not None and (why := title_problem(name)):
            raise ValueError(f"it {why}")
        return name


def endpoint(on: Service) -> Endpoint:
    """Build the endpoint that reads a beginning."""
    fields = Fields(WarmBody.model_fields, NOT_BUILT)
    return on.front(partial(_read, on.host, fields, on.settings.keep_volatile))


def _read(host: Host, sorting: Fields, keep_volatile: bool, fields: dict[str, Any]) -> ParsedRequest:
    """Read a body's fields. keep_volatile: the setting. Raises Rejection."""
    fields, ignored = sorting.sort(fields)
    body = validate(WarmBody, without_refused(fields, NOT_BUILT))
    if (body.messages is None) == (body.session is None):
        raise Rejection("messages or session is required, one of them", param="messages")
    if not host.keeps:
        raise Rejection("this daemon keeps nothing: it runs with --no-store", status=404, code="no_store")
    model = host.shelf.find(body.model)
    dropped: set[str] = set()
    request = Request(())
    if body.session is None:
        plain = body.model_copy(update={"stream_options": None})
        vocabulary, kept = model.manifest.vocabulary, None if keep_volatile else dropped
        whole = to_request(plain, vocabulary, dropped=kept)
        request = Request(whole.messages, given=whole.given)
    name = body.name or UNNAMED
    beginning = Beginning(name, body.idle, body.session, body.key)
    written = partial(_WarmAnswer, name, model.name, body.idle)
    return ParsedRequest(
        model,
        Request(request.messages, given=request.given, max_tokens=1, warm=beginning),
        stream=False,
        answer=written,
        followed=written,
        keep_alive_s=body.keep_alive,
        ignored=ignored,
        dropped=tuple(sorted(dropped)),
    )


class _WarmAnswer(Answer):
    """The answer to a beginning that was read: one object, never a stream."""

    def __init__(self, name: str, model: str, idle: bool, head: ResponseInfo) -> None:
        self._name, self._model, self._idle, self._dropped = name, model, idle, head.dropped

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Mapping[str, Any]:
        """Return the beginning as `row` has it. Raises Rejection if it is not stored."""
        if usage.stopped:
            raise Rejection("the reading was stopped; a new request goes on from there", status=409, code="stopped")
        if not usage.stored or (not self._idle and not usage.state_stored):
            what = "its state was" if usage.stored else "the beginning was"
            said = (
                f"{what} not stored: pinned sessions leave no room (`ssmd session list` shows the space that they "
                "take), or the disk is full or too slow; /health says more. Send the request again after that"
            )
            raise Rejection(said, status=507, code="storage_error")
        return {
            "id": usage.session,
            "object": "warm",
            "name": self._name,
            "model": self._model,
            "tokens": usage.prompt_tokens - 1,  # the last one is only there to be decoded
            "cached_tokens": min(usage.cached_tokens, usage.prompt_tokens - 1),
            "ready": usage.state_stored,
            **({"dropped": list(self._dropped)} if self._dropped else {}),
        }

    def opening(self) -> Iterable[bytes]:
        return ()

    def delta(self, delta: Delta) -> bytes:
        return b""

    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterable[bytes]:
        return ()

    def failure(self, error: Rejection) -> bytes:
        return b""


class Warm:
    """The handler of the list."""

    def __init__(self, on: Service) -> None:
        self._host, self._store, self._pool = on.host, on.store, on.pool

    async def rows(self, request: HttpRequest) -> JSONResponse:
        """List the beginnings. Those that other processes left without a state are read when no request waits."""
        host, store, domain = self._host, self._store, caller_of(request.scope).domain

        def listed() -> list[WarmBeginning]:
            host.look_for_warm()
            return [] if store is None else store.of(domain).warm()

        try:
            found = await self._pool.run(listed, client_of(request))
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err
        return JSONResponse({"object": "list", "data": [row(one) for one in found]})


def row(one: WarmBeginning) -> dict[str, Any]:
    """Describe a warm beginning. bytes: of its states."""
    session = one.session
    return {
        "id": session.id,
        "object": "warm",
        "name": session.title,
        "model": session.info.model,
        "tokens": one.tokens,
        "ready": one.ready,
        "bytes": session.nbytes,
        "imported": session.info.imported is not None,
        "key": session.info.owner,
        "created": int(session.created_at.timestamp()),
    }
