"""/v1/conversations: OpenAI's conversations. Each is a session with a list of items, which responses go on from.

A request that changes a conversation is refused while another one does, in OpenAI's words.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field
from sqlalchemy import Connection
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ssmd.api.generate.fair_reading import client_of
from ssmd.api.http.access import caller_of
from ssmd.api.http.body import StrictModel, parse_object, read_body, validate
from ssmd.api.openai.responses.items import flat_name, read_items
from ssmd.api.openai.responses.state import History, messages_in, no_conversation
from ssmd.api.openai.responses.stored import ConversationItems, Page, listed
from ssmd.api.operation import Service
from ssmd.engine.terms import Rejection
from ssmd.sessions.rows import conversations as rows
from ssmd.sessions.rows.conversations import Conversation, Entry
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, UnknownSession, local_now
from ssmd.text.messages import Message

T = TypeVar("T")
B = TypeVar("B")  # of what a body is read as
MAX_ADDED = 20  # items that one request may add, as OpenAI has it
Described = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Added = Annotated[list[Any], Field(max_length=MAX_ADDED)]


class ConversationBody(StrictModel):
    """The fields of a new conversation."""

    items: Added | None = None
    metadata: Described | None = None


class DescriptionBody(StrictModel):
    """The fields of a conversation that can be changed."""

    metadata: Described | None


class AddedItemsBody(StrictModel):
    """Items for a conversation."""

    items: Added


class Conversations:
    """The handlers."""

    def __init__(self, on: Service) -> None:
        self._store, self._pool, self._under_way = on.store, on.pool, on.under_way
        self._writing = threading.Lock()  # SQLite lets one write at a time, and the others only try again and again

    async def create(self, request: HttpRequest) -> Response:
        raw = await read_body(request)

        def work(store: Store) -> Response:
            body = validate(ConversationBody, parse_object(raw) if raw.strip() else {})
            messages, entry = _read(store, body.items or [], raw)

            def write(connection: Connection) -> Conversation:
                one = rows.create(connection, body.metadata or {}, local_now(), store.domain.owner, store.quota)
                if messages:
                    rows.add(connection, one, messages, entry, store.quota, store.domain)
                return one

            return JSONResponse(_object(self._write(store, write)))

        return await self._ask(request, work)

    async def get(self, request: HttpRequest) -> Response:
        def work(store: Store) -> Response:
            with store.snapshot() as stored:
                return JSONResponse(_object(stored.conversation(_name(request))))

        return await self._ask(request, work)

    async def update(self, request: HttpRequest) -> Response:
        """Give a conversation other metadata."""
        raw = await read_body(request)

        def read() -> DescriptionBody:
            return validate(DescriptionBody, parse_object(raw))

        def work(store: Store, body: DescriptionBody) -> Response:
            change = partial(rows.describe, name=_name(request), metadata=body.metadata or {}, domain=store.domain)
            return JSONResponse(_object(self._write(store, change)))

        return await self._alone(request, read, work)

    async def delete(self, request: HttpRequest) -> Response:
        """Delete a conversation with all its text."""

        def work(store: Store, _: object) -> Response:
            name = _name(request)
            with store.snapshot() as stored:
                stored.conversation(name)
            store.delete(name)
            return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

        return await self._alone(request, _nothing, work)

    async def items(self, request: HttpRequest) -> Response:
        """Answer with a page of a conversation's items."""
        known = {name: value for name, value in request.query_params.items() if name in Page.model_fields}
        page = validate(Page, known)

        def work(store: Store) -> Response:
            with store.snapshot() as stored:
                return ConversationItems(stored, stored.conversation(_name(request))).page(page)

        return await self._ask(request, work)

    async def add(self, request: HttpRequest) -> Response:
        """Add items to a conversation. An SDK's retry adds none that the first attempt added."""
        raw, again = await read_body(request), request.headers.get("x-stainless-retry-count", "0") != "0"

        def read() -> AddedItemsBody:
            return validate(AddedItemsBody, parse_object(raw))

        def work(store: Store, body: AddedItemsBody) -> Response:
            with store.snapshot() as stored:
                one = stored.conversation(_name(request))
                last = stored.entries(one, [one.entries])
                if again and last and last[0].sent == _hash(raw):
                    return _items_of(stored, one)
                messages, entry = _read(store, body.items, raw, partial(messages_in, stored, one))
            if not messages:
                return listed([])

            def write(connection: Connection) -> None:
                now = rows.read_conversation(connection, one.id, store.domain)
                rows.add(connection, now, messages, entry, store.quota, store.domain)

            self._write(store, write)
            with store.snapshot() as stored:
                return _items_of(stored, stored.conversation(one.id))

        return await self._alone(request, read, work)

    async def item(self, request: HttpRequest) -> Response:
        def work(store: Store) -> Response:
            with store.snapshot() as stored:
                _, item = _item(request, stored, stored.conversation(_name(request)))
            return JSONResponse(item)

        return await self._ask(request, work)

    async def remove(self, request: HttpRequest) -> Response:
        """Leave an item out of a conversation. Its text goes with the conversation."""

        def work(store: Store, _: object) -> Response:
            with store.snapshot() as stored:
                one = stored.conversation(_name(request))
                at, item = _item(request, stored, one)
                [entry] = stored.entries(one, [at + 1])

            def write(connection: Connection) -> Conversation:
                now = rows.read_conversation(connection, one.id, store.domain)
                rows.withdraw(connection, now, entry, [item["id"]])
                return now

            return JSONResponse(_object(self._write(store, write)))

        return await self._alone(request, _nothing, work)

    def _write(self, store: Store, work: Callable[[Connection], T]) -> T:
        """Run a write transaction for a few words, also on a nearly full disk. Raises StoreError."""

        def attempt() -> T:
            with self._writing, store.writing() as connection:
                return work(connection)

        done = store.room.for_words(attempt)
        store.room.tidy()
        return done

    async def _alone(
        self, request: HttpRequest, read: Callable[[], B], work: Callable[[Store, B], Response]
    ) -> Response:
        """Run work that changes a conversation, while no other request does. Raises Rejection.

        read: reads the request's body, for `work`.
        """
        name = _name(request)

        def first(store: Store) -> B:
            body = read()
            with store.snapshot() as stored:
                stored.conversation(name)  # a stranger is not told that it is being changed
            return body

        body = await self._ask(request, first)
        with self._under_way.alone(name):
            return await self._ask(request, lambda store: work(store, body))

    async def _ask(self, request: HttpRequest, work: Callable[[Store], T]) -> T:
        """Run work that blocks on the store in a thread, when it is the client's turn. Raises Rejection."""
        name = request.path_params.get("id")
        if self._store is None:
            said = "conversations are not kept here: this daemon runs with --no-store"
            raise Rejection(said, code="not_supported") if name is None else no_conversation(name, self._store)
        store = self._store.of(caller_of(request.scope).domain)
        try:
            return await self._pool.run(partial(work, store), client_of(request))
        except UnknownSession:
            raise no_conversation(str(name), self._store) from None
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err


def _name(request: HttpRequest) -> str:
    return str(request.path_params["id"])


def _nothing() -> None:
    """Read no body: the route has none."""


def _object(one: Conversation) -> Mapping[str, Any]:
    return {"id": one.id, "object": "conversation", "created_at": one.created, "metadata": dict(one.metadata)}


def _items_of(stored: Snapshot, one: Conversation) -> Response:
    """Return the items of the last entry, as they were added."""
    return listed(ConversationItems(stored, one).of_part(one.entries - 1))


def _item(request: HttpRequest, stored: Snapshot, one: Conversation) -> tuple[int, Mapping[str, Any]]:
    """Return (number of its part, item). Raises Rejection if the conversation has no such item."""
    id_ = str(request.path_params["item"])
    try:
        return ConversationItems(stored, one).item(id_)
    except UnknownSession:
        said = f"Item with id {id_[:128]!r} not found in this conversation."
        raise Rejection(said, status=404, code="item_not_found") from None


def _read(
    store: Store, items: Sequence[Any], raw: bytes, before: Callable[[], tuple[Message, ...]] = tuple
) -> tuple[tuple[Message, ...], Entry]:
    """Return the messages of items, and the facts of their entry. Raises Rejection.

    before: returns the messages of the conversation, whose calls these items may have the results of.
    """
    objects = [item for item in items if isinstance(item, dict)]
    calls = {str(item.get("call_id")) for item in objects if str(item.get("type")).endswith("_call")}
    results = {str(item.get("call_id")) for item in objects if str(item.get("type")).endswith("_call_output")}
    earlier = before() if results - calls else ()
    messages = read_items(items, before=earlier, stored=History(store).item)[len(earlier) :]
    origins: dict[str, list[str | None]] = {}
    for item in objects:
        kind, name, space = item.get("type"), item.get("name"), item.get("namespace") or None
        if kind == "custom_tool_call" or (kind == "function_call" and space):
            origins[flat_name(space, str(name))] = ["custom" if kind == "custom_tool_call" else "function", name, space]
    custom = [str(item["call_id"]) for item in objects if item.get("type") == "custom_tool_call_output"]
    return messages, Entry(sent=_hash(raw), origins=origins, custom=custom)


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
