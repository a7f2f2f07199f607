"""Stored responses: found by id, continued, retrieved and deleted. A response is a turn with the facts of its request.

Its id is that of its turn, in other words. So it is an immutable checkpoint: a request that continues it has the
turn's conversation before its own input, and the engine finds the state after that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ssmd.api.generate.answer import InFlightAnswer, ResponseInfo, locked
from ssmd.api.generate.fair_reading import client_of
from ssmd.api.http.access import caller_of
from ssmd.api.http.body import StrictModel, brief, validate
from ssmd.api.openai.responses.answer import ResponseForm, ending, usage_of
from ssmd.api.openai.responses.background import (
    EventResponse,
    follow,
    object_of_receipt,
    object_under_way,
    response_of,
    retold,
    retold_end,
    write_all,
)
from ssmd.api.openai.responses.items import read_items
from ssmd.api.openai.responses.stored import ITEM_ID, ConversationItems, Page, ResponseItems, given_in, output_of
from ssmd.api.openai.responses.tools import ToolOrigin
from ssmd.api.operation import Service
from ssmd.engine.request import Usage, turn_of
from ssmd.engine.terms import Rejection
from ssmd.sessions.rows.conversations import ADDED, Conversation, place_of
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, Turn, UnknownSession, conversation
from ssmd.text.messages import Message

Item = dict[str, Any]
Result = TypeVar("Result")
MAX_REFERRED_CHARS = 16 << 20  # of the items that a request refers to, and of the turns that are read for them
_ID = re.compile(r"resp_(gen_[0-9a-f]{24})")
_WITHDRAWN: Mapping[str, Any] = {"withdrawn": True}  # facts of a response that was deleted while others follow on it
_PREVIOUS = "previous_response_id"


def facts_of(form: ResponseForm, *, instructed: bool) -> dict[str, Any]:
    """Return the facts to keep with a response's turn. instructed: its conversation begins with its instructions."""
    origins = {
        flat: [origin.kind, origin.name, origin.namespace]
        for flat, origin in form.origins.items()
        if origin != ToolOrigin("function", flat)
    }
    echo = {name: value for name, value in form.echo.items() if name not in ("tools", "instructions")}
    return {"model": form.model, "echo": echo, "instructed": instructed, "origins": origins}


class History:
    """The stored responses and items that one request may refer to, as the caller's domain sees them."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._turn, self._items = "", dict[str, Item]()  # the turn that was read last
        self._referred = 0  # characters so far

    def before(self, previous: str) -> tuple[tuple[Message, ...], str]:
        """Return the conversation up to a response, without its instructions, and its session. Raises Rejection."""
        turn = _turn_id(previous)
        unknown = Rejection(
            f"Previous response with id {brief(previous)} not found.{_why(self._store)}",
            status=404,
            code="previous_response_not_found",
            param=_PREVIOUS,
        )
        if self._store is None or turn is None:
            raise unknown
        try:
            with self._store.snapshot() as stored:
                found, facts = _answered(stored, turn, _PREVIOUS)
                return _before(stored, turn, facts), found.session
        except UnknownSession:
            raise unknown from None
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err

    def conversation(self, name: str) -> tuple[tuple[Message, ...], Conversation]:
        """Return all messages of a conversation, and its facts. Raises Rejection."""
        unknown = no_conversation(name, self._store, "conversation")
        if self._store is None:
            raise unknown
        try:
            with self._store.snapshot() as stored:
                one = stored.conversation(name)
                return messages_in(stored, one), one
        except UnknownSession:
            raise unknown from None
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err

    def check(self, one: Conversation) -> None:
        """Check that a conversation has the items that it had. Raises Rejection."""
        if self._store is None:
            return
        try:
            with self._store.snapshot() as stored:
                if not stored.conversation(one.id).has_items_of(one):
                    raise locked()
        except UnknownSession:
            raise no_conversation(one.id, self._store, "conversation") from None
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err

    def item(self, item_id: str, param: str) -> Item:
        """Return an item of a stored response. Raises Rejection."""
        found = ITEM_ID.fullmatch(item_id)
        unknown = Rejection(
            f"Item with id {brief(item_id)} not found. Items are not persisted when `store` is set to false: send the "
            f"item itself.{_why(self._store)}",
            status=404,
            code="item_not_found",
            param=param,
        )
        if self._store is None or found is None:
            raise unknown
        try:
            item = self._items_of(f"turn_{found[1]}", self._store, param).get(item_id)
        except UnknownSession:
            raise unknown from None
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err
        if item is None:
            raise unknown
        self._count(item, param)
        return item

    def _items_of(self, name: str, store: Store, param: str) -> Mapping[str, Item]:
        """Return the items of a turn by id. Raises Rejection, UnknownSession and StoreError."""
        if name != self._turn:
            with store.snapshot() as stored:
                every = _items(stored, name)
            self._turn, self._items = name, {one["id"]: one for one in every}
            for one in self._items.values():
                self._count(one, param)
        return self._items

    def _count(self, item: Item, param: str) -> None:
        """Count the characters of an item: a reference is short, and may name a long one again and again."""
        self._referred += len(json.dumps(item, ensure_ascii=False))
        if self._referred > MAX_REFERRED_CHARS:
            raise Rejection(
                f"{param}: the items that this request refers to are too long together; go on from a response by its "
                "id in previous_response_id",
                code="invalid_value",
                param=param,
            )


class Retrieval(StrictModel):
    """Query parameters of a response that is retrieved."""

    model_config = ConfigDict(strict=False)  # query parameters are text
    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class StoredResponses:
    """The handlers."""

    def __init__(self, on: Service) -> None:
        self._store, self._pool, self._under_way = on.store, on.pool, on.under_way
        self._stall_s, self._silence_s = on.stall_s, on.settings.stream_comment

    async def get(self, request: HttpRequest) -> Response:
        """Answer with a response, also one that is under way: whole, or as its events."""
        known = {name: value for name, value in request.query_params.items() if name in Retrieval.model_fields}
        asked = validate(Retrieval, known)
        if not asked.stream:
            return await self._whole(request)
        after = -1 if asked.starting_after is None else asked.starting_after
        begun = self._begun(request)
        if begun is not None:
            return EventResponse(partial(follow, begun, after), begun.head.headers, self._stall_s, self._silence_s)

        def told(store: Store) -> EventResponse:
            events = stored_events(store, request.path_params["id"], after)
            return EventResponse(partial(write_all, events), {}, self._stall_s, self._silence_s)

        return await self._ask(request, told)

    async def _whole(self, request: HttpRequest) -> Response:
        id_, begun = request.path_params["id"], self._begun(request)
        if begun is not None:  # between its last event and the store its end is nowhere else
            begun = await begun.unless_ended()
        if begun is not None:
            return Response(object_under_way(begun), media_type="application/json")

        def whole(store: Store) -> Response:
            with store.snapshot() as stored:
                turn_id = _known(id_)
                receipt = stored.receipt(turn_id)
                if receipt is not None:
                    return Response(object_of_receipt(turn_id, receipt), media_type="application/json")
                turn, facts = _found(stored, turn_id)
                first = stored.first(turn).content if facts.get("instructed") else None
            return JSONResponse(_response(id_, turn, facts, first))

        return await self._ask(request, whole)

    async def delete(self, request: HttpRequest) -> Response:
        """Delete a response. One in the background that is under way is cancelled first."""
        id_ = request.path_params["id"]
        await self._stop(request)

        def remove(store: Store) -> Response:
            turn_id = _known(id_)
            with store.snapshot() as stored:
                unanswered = stored.receipt(turn_id) is not None
                turn, facts = (None, {}) if unanswered else _found(stored, turn_id)
            if turn is None:
                store.drop_receipt(turn_id)
            else:
                store.remove_turn(turn.id, {**facts, **_WITHDRAWN} if "conversation" in facts else _WITHDRAWN)
            return JSONResponse({"id": id_, "object": "response.deleted", "deleted": True})

        return await self._ask(request, remove)

    async def cancel(self, request: HttpRequest) -> Response:
        """Stop a response in the background, and answer with it. One that has ended is returned as it is."""
        refusal = Rejection("Cannot cancel a synchronous response.", code="invalid_value", param="response")
        if not await self._stop(request) and self._begun(request) is not None:
            raise refusal

        def check(store: Store) -> None:
            with store.snapshot() as stored:
                turn_id = _known(request.path_params["id"])
                if stored.receipt(turn_id) is None and not _found(stored, turn_id)[1]["echo"].get("background"):
                    raise refusal

        await self._ask(request, check)
        return await self._whole(request)

    async def _stop(self, request: HttpRequest) -> bool:
        """Stop a response in the background, and wait until its end is stored. Returns False if none is under way."""
        begun = self._begun(request)
        if begun is None or not begun.accepted:
            return False
        begun.stop()
        await begun.settled.wait()
        return True

    async def input_items(self, request: HttpRequest) -> Response:
        """Answer with a page of the items that a response's model read, instructions left out."""
        known = {name: value for name, value in request.query_params.items() if name in Page.model_fields}
        page, id_ = validate(Page, known), request.path_params["id"]

        def listed(store: Store) -> Response:
            with store.snapshot() as stored:
                turn, facts = _answered(stored, _known(id_), None)
                return ResponseItems(stored, turn.id, facts).page(page)

        return await self._ask(request, listed)

    def _begun(self, request: HttpRequest) -> InFlightAnswer | None:
        """Return a response that is under way; None if there is no such one."""
        try:
            found = self._under_way.find(request.path_params["id"], caller_of(request.scope).domain)
        except Rejection:
            return None
        return None if found.request.facts is None else found

    async def _ask(self, request: HttpRequest, work: Callable[[Store], Result]) -> Result:
        """Run work that blocks on the store in a thread, when it is the client's turn. Raises Rejection."""
        id_ = request.path_params["id"]
        unknown = Rejection(
            f"Response with id {brief(id_)} not found.{_why(self._store)}", status=404, code="response_not_found"
        )
        if self._store is None:
            raise unknown
        store = self._store.of(caller_of(request.scope).domain)
        try:
            return await self._pool.run(partial(work, store), client_of(request))
        except UnknownSession:
            raise unknown from None
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err


def no_conversation(name: str, store: Store | None, param: str | None = None) -> Rejection:
    """Build the error for a conversation that is not there, or another key's."""
    said = f"Conversation with id {brief(name)} not found.{_why(store)}"
    return Rejection(said, status=404, code="conversation_not_found", param=param)


def messages_in(stored: Snapshot, one: Conversation) -> tuple[Message, ...]:
    """Return all messages of a conversation. Raises Rejection, UnknownSession and StoreError.

    Those up to the last response stand in the turns above it. If an item was deleted among them, all are read from the
    list.
    """
    messages: tuple[Message, ...] = ()
    first = 0
    if one.whole is not None:
        first, turn = one.whole
        messages = _before(stored, turn, stored.facts([turn]).get(turn, {}))
    if first == one.entries:
        return messages
    items = ConversationItems(stored, one).items(first)
    return read_items(list(items), before=messages, param="conversation")


def _before(stored: Snapshot, turn: str, facts: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the conversation up to a turn, without its instructions. Raises UnknownSession."""
    messages = conversation(stored.path(turn))
    return messages[1:] if facts.get("instructed") else messages


def _items(stored: Snapshot, turn_id: str) -> list[Item]:
    """Return the items of a response's turn, or of items that were added to a conversation. Raises UnknownSession."""
    turn = stored.turn(turn_id)
    if turn.finish == ADDED:
        one = stored.conversation(turn.session)
        number = place_of(turn_id, one)
        return [] if number is None else ConversationItems(stored, one).of_part(number - 1)
    turn, facts = _found(stored, turn_id)
    gone: Collection[str] = ()
    if "conversation" in facts:
        gone = ConversationItems(stored, stored.conversation(turn.session)).gone(turn_id)
    return [item for item in (*given_in(turn, facts), *output_of(turn, facts)) if item["id"] not in gone]


def stored_events(store: Store, id_: str, after: int) -> Iterator[bytes]:
    """Return the events of a response that has ended, but those up to number `after`. Raises Rejection."""
    with store.snapshot() as stored:
        turn_id = _known(id_)
        receipt = stored.receipt(turn_id)
        if receipt is not None:
            return retold_end(turn_id, receipt, after)
        turn, facts = _found(stored, turn_id)
        first = stored.first(turn).content if facts.get("instructed") else None
    return retold(turn, facts, first, after)


def _found(stored: Snapshot, turn_id: str) -> tuple[Turn, Mapping[str, Any]]:
    """Return the turn of a response and its facts. Raises UnknownSession if it is unknown, hidden or deleted."""
    turn = stored.turn(turn_id)
    stored.info(turn.session)
    facts = stored.facts([turn_id]).get(turn_id, {})
    if not facts or facts.get("withdrawn"):
        raise UnknownSession(f"there is no response of turn {turn_id!r}")
    return turn, facts


def _answered(stored: Snapshot, turn_id: str, param: str | None) -> tuple[Turn, Mapping[str, Any]]:
    """Return the same. Raises Rejection too, if the response has no answer yet, or never got one."""
    if stored.receipt(turn_id) is not None:
        raise Rejection(
            f"Response with id {response_of(turn_id)} has no answer: it is still under way, was cancelled or failed. "
            "Retrieve it to see its status, and send this again once it is completed.",
            code="response_not_completed",
            param=param,
        )
    return _found(stored, turn_id)


def _turn_id(id_: str) -> str | None:
    """Return the id of the turn that a response of this id is stored as; None for an id of another form."""
    found = _ID.fullmatch(id_)
    return None if found is None else turn_of(found[1])


def _known(id_: str) -> str:
    """Return the same. Raises UnknownSession."""
    turn = _turn_id(id_)
    if turn is None:
        raise UnknownSession(f"{id_!r} is no id of a response")
    return turn


def _why(store: Store | None) -> str:
    return "" if store is not None else " This daemon keeps no responses: it runs with --no-store."


def _response(id_: str, turn: Turn, facts: Mapping[str, Any], instructions: str | None) -> dict[str, Any]:
    """Return a stored response as it was answered; its tools are not kept."""
    usage = Usage(**facts["usage"])
    background = bool(facts["echo"].get("background"))
    status, why = ending(facts["finish_reason"], usage, background=background, complete=turn.complete)
    head = ResponseInfo(id_, facts["created"], turn.session)
    return {
        **facts["echo"],
        "id": id_,
        "object": "response",
        "created_at": facts["created"],
        "status": status,
        **({"completed_at": int(turn.created_at.timestamp())} if status == "completed" else {}),
        "error": None,
        "incomplete_details": None if why is None else {"reason": why},
        "instructions": instructions,
        "model": facts["model"],
        "output": [*output_of(turn, facts)],
        "store": True,
        "tools": [],
        "usage": usage_of(usage, head),
    }
