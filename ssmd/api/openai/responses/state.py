"""Stored responses: found by id, continued, retrieved and deleted. A response is a turn with the facts of its request.

Its id is that of its turn, in other words. So it is an immutable checkpoint: a request that continues it has the
turn's conversation before its own input, and the engine finds the state after that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ssmd.api.generate.answer import ResponseInfo
from ssmd.api.generate.fair_reading import client_of
from ssmd.api.http.body import StrictModel, brief, object_with, validate
from ssmd.api.http.keys import caller_of
from ssmd.api.openai.responses.answer import ResponseForm, ending, response_id, usage_of
from ssmd.api.openai.responses.tools import ToolOrigin
from ssmd.api.operation import Service
from ssmd.engine.request import Usage, turn_of
from ssmd.engine.terms import Rejection
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, Turn, UnknownSession, conversation
from ssmd.text.messages import THINK_END, Message

Item = dict[str, Any]
Result = TypeVar("Result")
MAX_ITEMS = 100  # of a page
MAX_REFERRED_CHARS = 16 << 20  # of the items that a request refers to, and of the turns that are read for them
_ID = re.compile(r"resp_(gen_[0-9a-f]{24})")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})_[0-9i_]{1,16}")
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
                found, facts = _found(stored, turn)
                path = stored.path(turn)
        except UnknownSession:
            raise unknown from None
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err
        messages = conversation(path)
        return messages[1:] if facts.get("instructed") else messages, found.session

    def item(self, item_id: str, param: str) -> Item:
        """Return an item of a stored response. Raises Rejection."""
        found = _ITEM_ID.fullmatch(item_id)
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
                turn, facts = _found(stored, name)
            self._turn, self._items = name, {one["id"]: one for one in (*_given(turn, facts), *_output(turn, facts))}
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


class _Page(StrictModel):
    """Query parameters of a part of a list."""

    model_config = ConfigDict(strict=False)  # query parameters are text
    limit: Annotated[int, Field(ge=1, le=MAX_ITEMS)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Field(max_length=128)] | None = None


class StoredResponses:
    """The handlers."""

    def __init__(self, on: Service) -> None:
        self._store, self._pool, self._under_way = on.store, on.pool, on.under_way

    async def get(self, request: HttpRequest) -> Response:
        """Answer with a response, also one that is under way."""
        if request.query_params.get("stream") == "true":
            said = "a stored response comes whole, not as a stream; leave stream out"
            raise Rejection(said, code="unsupported_parameter", param="stream")
        id_ = request.path_params["id"]
        if (begun := self._begun(request)) is not None:
            return JSONResponse(begun)

        def whole(store: Store) -> Response:
            with store.snapshot() as stored:
                turn, facts = _found(stored, _known(id_))
                first = stored.first(turn).content if facts.get("instructed") else None
            return JSONResponse(_response(id_, turn, facts, first))

        return await self._ask(request, whole)

    async def delete(self, request: HttpRequest) -> Response:
        id_ = request.path_params["id"]

        def remove(store: Store) -> Response:
            with store.snapshot() as stored:
                turn, _ = _found(stored, _known(id_))
            store.remove_turn(turn.id, _WITHDRAWN)
            return JSONResponse({"id": id_, "object": "response.deleted", "deleted": True})

        return await self._ask(request, remove)

    async def cancel(self, request: HttpRequest) -> Response:
        """Stop a response that is under way. Its client gets what came so far."""
        if (begun := self._begun(request)) is not None:
            self._under_way.find(request.path_params["id"], caller_of(request.scope).domain).stop()
            return JSONResponse({**begun, "status": "cancelled"})

        def refuse(store: Store) -> Response:
            with store.snapshot() as stored:
                _found(stored, _known(request.path_params["id"]))
            raise Rejection("Cannot cancel a response that has ended.", code="invalid_value", param="response")

        return await self._ask(request, refuse)

    async def input_items(self, request: HttpRequest) -> Response:
        """Answer with a page of the items that a response's model read, instructions left out."""
        known = {name: value for name, value in request.query_params.items() if name in _Page.model_fields}
        page, id_ = validate(_Page, known), request.path_params["id"]

        def listed(store: Store) -> Response:
            with store.snapshot() as stored:
                turn, facts = _found(stored, _known(id_))
                return _Items(stored, turn, facts).page(page)

        return await self._ask(request, listed)

    def _begun(self, request: HttpRequest) -> dict[str, Any] | None:
        """Return a response that is under way; None if there is no such one."""
        try:
            found = self._under_way.find(request.path_params["id"], caller_of(request.scope).domain)
        except Rejection:
            return None
        facts = found.request.facts
        if facts is None:
            return None
        about = {"id": response_id(found.request.id), "object": "response", "created_at": found.head.created}
        ends: Item = {"error": None, "incomplete_details": None, "output": [], "usage": None, "tools": []}
        return {**facts["echo"], **about, **ends, "status": "in_progress", "model": facts["model"], "store": True}

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


def _found(stored: Snapshot, turn_id: str) -> tuple[Turn, Mapping[str, Any]]:
    """Return the turn of a response and its facts. Raises UnknownSession if it is unknown, hidden or deleted."""
    turn = stored.turn(turn_id)
    stored.info(turn.session)
    facts = stored.facts([turn_id]).get(turn_id, {})
    if not facts or facts.get("withdrawn"):
        raise UnknownSession(f"there is no response of turn {turn_id!r}")
    return turn, facts


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
    status, why = ending(facts["finish_reason"], usage) if turn.complete else ("incomplete", "stopped")
    output = list(_output(turn, facts))
    if why is not None and output:
        output[-1] = {**output[-1], "status": "incomplete"}
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
        "output": output,
        "store": True,
        "tools": [],
        "usage": usage_of(usage, head),
    }


def _digits(turn: Turn) -> str:
    return turn.id.partition("_")[2]


def _form(facts: Mapping[str, Any]) -> ResponseForm:
    """Return the form of a turn's items: calls get the names that their client gave its tools."""
    origins = {flat: ToolOrigin(*origin) for flat, origin in facts.get("origins", {}).items()}
    return ResponseForm(model="", echo={}, store=True, origins=origins, encrypts=False)


def _output(turn: Turn, facts: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the items of a turn's answer, without a beginning that the client wrote."""
    answer, begun = turn.answer, facts.get("begun", 0)
    yield from _answer(answer.content[begun:], answer, _form(facts), _digits(turn))


def _answer(content: str, answer: Message, form: ResponseForm, digits: str) -> Iterator[Item]:
    count = 0
    if answer.reasoning:
        yield form.reasoning(f"{digits}_0", answer.reasoning)
        count = 1
    text = content.rpartition(THINK_END)[2].lstrip("\n") if THINK_END in content else content
    if text or not answer.tool_calls:
        yield form.message(f"{digits}_{count}", text)
        count += 1
    for i, call in enumerate(answer.tool_calls, count):
        yield form.call(f"{digits}_{i}", call.id, call.name, call.arguments)


def _given(turn: Turn, facts: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the items of a turn's input."""
    form, custom = _form(facts), _custom_calls(turn, facts)
    for i, message in enumerate(turn.messages):
        yield from _said(message, form, f"{_digits(turn)}_i{i}", custom)


def _custom_calls(turn: Turn, facts: Mapping[str, Any]) -> set[str]:
    """Return the ids of the calls of custom tools in a turn."""
    names = {flat for flat, origin in facts.get("origins", {}).items() if origin[0] == "custom"}
    return {c.id for m in turn.conversation for c in m.tool_calls if c.name in names}


def _said(message: Message, form: ResponseForm, digits: str, custom: set[str]) -> Iterator[Item]:
    """Yield the items of a message of the input."""
    if message.tool_call_id is not None:
        kind = "custom_tool_call_output" if message.tool_call_id in custom else "function_call_output"
        prefix = "ctco" if kind.startswith("custom") else "fco"
        fields = {"call_id": message.tool_call_id, "output": message.content}
        yield {"id": f"{prefix}_{digits}", "type": kind, "status": "completed", **fields}
    elif message.role == "assistant":
        yield from _answer(message.content, message, form, digits)
    else:
        part = {"type": "input_text", "text": message.content}
        yield form.item("message", digits, role=message.role, content=[part])


class _Items:
    """The items that a response's model read: those of its path but for the last answer, and its instructions.

    Turns are read as a page needs them, so that a page of a long conversation costs as much as one of a short one.
    """

    def __init__(self, stored: Snapshot, turn: Turn, facts: Mapping[str, Any]) -> None:
        self._stored, self._instructed = stored, bool(facts.get("instructed"))
        self._ids = stored.path_ids(turn.id)

    def page(self, page: _Page) -> Response:
        """Return a page of the list. Raises Rejection if `after` names no item of it."""
        at, last, step = 0, len(self._ids) - 1, 1 if page.order == "asc" else -1
        skipped = page.after is not None
        if page.after is not None:
            found = _ITEM_ID.fullmatch(page.after)
            name = "" if found is None else f"turn_{found[1]}"
            at = self._ids.index(name) if name in self._ids else -1
        elif page.order == "desc":
            at = last
        data: list[Item] = []
        while 0 <= at <= last and len(data) <= page.limit:
            items = self._of(at)[::step]
            if skipped:
                place = next((i for i, item in enumerate(items) if item["id"] == page.after), None)
                if place is None:
                    break
                items, skipped = items[place + 1 :], False
            data += items
            at += step
        if skipped:
            said = f"after: there is no item {brief(page.after)} in this list"
            raise Rejection(said, code="invalid_value", param="after")
        more, data = len(data) > page.limit, data[: page.limit]
        fields = {
            "object": "list",
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": more,
        }
        return Response(object_with("data", data, fields), media_type="application/json")

    def _of(self, at: int) -> list[Item]:
        """Return the items of a turn of the path."""
        turn, facts = self._read(at)
        custom = _custom_calls(turn, facts)
        if at and any(message.tool_call_id for message in turn.messages):
            custom |= _custom_calls(*self._read(at - 1))
        messages = turn.messages[1:] if self._instructed and at == 0 else turn.messages
        form, start, digits = _form(facts), len(turn.messages) - len(messages), _digits(turn)
        items = [
            item for i, message in enumerate(messages, start) for item in _said(message, form, f"{digits}_i{i}", custom)
        ]
        return items if at == len(self._ids) - 1 else [*items, *_output(turn, facts)]

    def _read(self, at: int) -> tuple[Turn, Mapping[str, Any]]:
        id_ = self._ids[at]
        return self._stored.turn(id_), self._stored.facts([id_]).get(id_, {})
