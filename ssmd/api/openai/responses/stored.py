"""Items of stored turns, and lists of them in pages.

Turns are read as a page needs them, and of a long turn only some messages: a page of a long list costs as much as one
of a short list.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.responses import Response

from ssmd.api.http.body import StrictModel, brief, object_with
from ssmd.api.openai.responses.answer import ResponseForm, ending
from ssmd.api.openai.responses.tools import ToolOrigin
from ssmd.engine.persist.replay import parts_of
from ssmd.engine.request import Delta, Usage
from ssmd.engine.terms import Rejection
from ssmd.sessions.rows.conversations import Conversation, Entry, place_of
from ssmd.sessions.rows.excerpts import BLOCK
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.turn import Turn, UnknownSession
from ssmd.text.messages import Message

Item = dict[str, Any]
Facts = Mapping[str, Any]
MAX_ITEMS = 100  # of a page
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})_(i?)([0-9]{1,8})(?:_[0-9]{1,4})?")
_FIRST, _AT_ONCE = 4, 32  # turns that are read at once: at first, and at most


class Page(StrictModel):
    """Query parameters of a part of a list."""

    model_config = ConfigDict(strict=False)  # query parameters are text
    limit: Annotated[int, Field(ge=1, le=MAX_ITEMS)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Field(max_length=128)] | None = None


@dataclass(frozen=True)
class Part:
    """The part of a turn that belongs to a list: its messages from `start` on, and its answer if it is `answered`."""

    turn: str
    facts: Facts
    messages: Sequence[Message] | None  # of the turn's whole input; None: it is long, and read in blocks
    count: int  # messages of its whole input
    start: int
    answered: bool
    answer: Message | None  # None: it is to be read, or not needed
    custom: frozenset[str]  # ids of calls of custom tools that it may have results of
    begun: int = 0  # characters of the answer that are left out, as the client wrote them
    gone: frozenset[str] = frozenset()  # ids of deleted items


class ItemList(ABC):
    """A list of items: parts of turns, numbered from 0."""

    def __init__(self, stored: Snapshot) -> None:
        self._stored = stored

    @property
    @abstractmethod
    def size(self) -> int:
        """Count the parts."""

    @abstractmethod
    def find(self, turn: str) -> int | None:
        """Return the number of a turn's part; None without one."""

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[Part | None]:
        """Read parts; None for one that is not there any more."""

    def page(self, page: Page) -> Response:
        """Return a page of the list. Raises Rejection if `after` names no item of it."""
        step = 1 if page.order == "asc" else -1
        if page.after is None:
            items = self._walk(0 if step > 0 else self.size - 1, None, step, page.limit)
        else:
            items = self._after(page.after, step, page.limit)
        data: list[Item] = []
        for item in items:
            data.append(item)
            if len(data) > page.limit:
                break
        return listed(data[: page.limit], more=len(data) > page.limit)

    def item(self, id_: str) -> tuple[int, Item]:
        """Return (number of its part, item). Raises UnknownSession if the list has no such item."""
        at, place = self._place(id_)
        if at is not None:
            for item in self._walk(at, place, 1, 1):
                if item["id"] == id_:
                    return at, item
                if _placed(item["id"]) != _placed(id_):
                    break
        raise UnknownSession(f"there is no item {id_!r} in this list")

    def items(self, first: int = 0) -> Iterator[Item]:
        """Yield the items of the parts from number `first` on."""
        return self._walk(first, None, 1, _AT_ONCE)

    def of_part(self, number: int) -> list[Item]:
        """Return the items of one part."""
        [part] = self.read([number])
        return [] if part is None else [*self._items_of(part, None, 1)]

    def _after(self, id_: str, step: int, limit: int) -> Iterator[Item]:
        at, place = self._place(id_)
        found = False
        if at is not None:
            for item in self._walk(at, place, step, limit):
                if found:
                    yield item
                elif item["id"] == id_:
                    found = True
                elif _placed(item["id"]) != _placed(id_):
                    break
        if not found:
            said = f"after: there is no item {brief(id_)} in this list"
            raise Rejection(said, code="invalid_value", param="after")

    def _place(self, id_: str) -> tuple[int | None, tuple[bool, int]]:
        turn, given, index = _placed(id_)
        return self.find(turn), (given, index)

    def _walk(self, at: int, place: tuple[bool, int] | None, step: int, limit: int) -> Iterator[Item]:
        """Yield the items of the parts from number `at` on, from a place in that part on.

        place: (True, index of a message of the input), or (False, 0) for the answer.
        """
        size, read, found = min(limit + 1, _FIRST), 0, 0
        while 0 <= at < self.size:
            numbers = range(at, max(-1, min(self.size, at + step * size)), step)
            for part in self.read(numbers):
                for item in () if part is None else self._items_of(part, place, step):
                    found += 1
                    yield item
                place = None
            at, read = at + step * len(numbers), read + len(numbers)
            # As many more as the rest of the page takes, if they have as many items as those before.
            size = max(1, min(_AT_ONCE, (limit + 1 - found) * read // max(1, found) + 1))

    def _items_of(self, part: Part, place: tuple[bool, int] | None, step: int) -> Iterator[Item]:
        """Yield the items of a part, or those from a place on."""
        first, last = part.start, part.count - 1
        if place is not None and place[0]:
            first, last = (max(first, place[1]), last) if step > 0 else (first, min(last, place[1]))
        answered = part.answered and (place is None or step > 0 or not place[0])
        given = place is None or step < 0 or place[0]
        if step < 0 and answered:
            yield from self._kept(part, [*self._output(part)][::-1])
        if given:
            for index, message in self._messages(part, first, last, step):
                form = form_of(part.facts)
                items = [*said(message, form, f"{_digits(part.turn)}_i{index}", part.custom)]
                yield from self._kept(part, items[::step])
        if step > 0 and answered:
            yield from self._kept(part, self._output(part))

    def _kept(self, part: Part, items: Iterable[Item]) -> Iterable[Item]:
        return (item for item in items if item["id"] not in part.gone) if part.gone else items

    def _messages(self, part: Part, first: int, last: int, step: int) -> Iterator[tuple[int, Message]]:
        """Yield (index, message) of the messages from `first` to `last`, or the other way round."""
        if first > last:
            return
        if part.messages is not None:
            for index in range(first, last + 1)[::step]:
                yield index, part.messages[index]
            return
        for number in range(first // BLOCK, last // BLOCK + 1)[::step]:
            block = self._stored.block(part.turn, part.facts["blocks"], number)
            at = number * BLOCK
            for index in range(max(first, at), min(last, at + BLOCK - 1) + 1)[::step]:
                yield index, block[index - at]

    def _output(self, part: Part) -> Iterator[Item]:
        answer = part.answer
        if answer is None:
            answer = self._stored.answer(part.turn, part.facts["blocks"])
        facts = part.facts if part.begun == part.facts.get("begun", 0) else {}
        yield from said_as(parts_of(answer, facts), form_of(part.facts), _digits(part.turn), _status(part.facts))

    def _said(self, names: Sequence[str]) -> tuple[Mapping[str, Sequence[Message]], Mapping[str, Facts]]:
        """Read the messages of turns, but of long ones, and their facts."""
        facts = self._stored.facts(names)
        return self._stored.said([one for one in names if not _is_long(facts.get(one, {}))]), facts


class ResponseItems(ItemList):
    """The items that a response's model read: those of its path but for the last answer, and its instructions."""

    def __init__(self, stored: Snapshot, turn: str, facts: Facts) -> None:
        super().__init__(stored)
        self._instructed = bool(facts.get("instructed"))
        self._path = stored.places(turn)

    @property
    def size(self) -> int:
        return self._path.size

    def find(self, turn: str) -> int | None:
        return self._path.find(turn)

    def read(self, numbers: Sequence[int]) -> list[Part | None]:
        names = self._path.ids(numbers)
        every, facts = self._said(names)
        return [
            self._part(n, name, every.get(name), facts.get(name, {})) for n, name in zip(numbers, names, strict=True)
        ]

    def _part(self, number: int, name: str, told: Sequence[Message] | None, facts: Facts) -> Part | None:
        start, answered, begun = int(self._instructed and number == 0), number < self.size - 1, facts.get("begun", 0)
        if _is_long(facts):
            return Part(name, facts, None, facts["blocks"]["messages"], start, answered, None, frozenset(), begun)
        if told is None:
            return None
        *messages, answer = told
        custom = custom_calls(told, facts)
        if number and any(message.tool_call_id for message in messages):
            above = self._path.ids([number - 1])
            custom |= custom_calls(
                self._stored.said(above).get(above[0], ()), self._stored.facts(above).get(above[0], {})
            )
        return Part(name, facts, messages, len(messages), start, answered, answer, custom, begun)


class ConversationItems(ItemList):
    """The items of a conversation."""

    def __init__(self, stored: Snapshot, of: Conversation) -> None:
        super().__init__(stored)
        self._of = of

    @property
    def size(self) -> int:
        return self._of.entries

    def find(self, turn: str) -> int | None:
        number = place_of(turn, self._of)
        if number is None:
            number = self._stored.facts([turn]).get(turn, {}).get("conversation", {}).get("entry", 0)
        entries = self._stored.entries(self._of, [number]) if 0 < number <= self.size else []
        return number - 1 if [entry.turn for entry in entries] == [turn] else None

    def gone(self, turn: str) -> frozenset[str]:
        """Return the ids of the deleted items of a turn."""
        number = self.find(turn)
        entries = [] if number is None else self._stored.entries(self._of, [number + 1])
        return frozenset(id_ for entry in entries for id_ in entry.gone)

    def read(self, numbers: Sequence[int]) -> list[Part | None]:
        entries = {entry.number: entry for entry in self._stored.entries(self._of, [n + 1 for n in numbers])}
        every, facts = self._said([entry.turn for entry in entries.values()])
        return [self._part(entries.get(n + 1), every, facts) for n in numbers]

    def _part(
        self, entry: Entry | None, every: Mapping[str, Sequence[Message]], facts: Mapping[str, Facts]
    ) -> Part | None:
        if entry is None:
            return None
        its = facts.get(entry.turn) or {"origins": entry.origins}
        custom, gone = frozenset(entry.custom), frozenset(entry.gone)
        if _is_long(its):
            count = its["blocks"]["messages"]
            start = max(0, count - entry.given)
            return Part(entry.turn, its, None, count, start, entry.answered, None, custom, 0, gone)
        if entry.turn not in every:
            return None
        *messages, answer = every[entry.turn]
        start = max(0, len(messages) - entry.given)
        return Part(entry.turn, its, messages, len(messages), start, entry.answered, answer, custom, 0, gone)


def listed(data: Sequence[Item], *, more: bool = False) -> Response:
    """Return a page of a list, with these items."""
    fields = {
        "object": "list",
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }
    return Response(object_with("data", data, fields), media_type="application/json")


def form_of(facts: Facts) -> ResponseForm:
    """Return the form of a turn's items: calls get the names that their client gave its tools."""
    origins = {flat: ToolOrigin(*origin) for flat, origin in facts.get("origins", {}).items()}
    return ResponseForm(model="", echo={}, store=True, origins=origins, encrypts=False)


def output_of(turn: Turn, facts: Facts) -> Iterator[Item]:
    """Yield the items of a turn's answer, without a beginning that the client wrote."""
    status = _status(facts) if turn.complete else "incomplete"
    yield from said_as(parts_of(turn.answer, facts), form_of(facts), _digits(turn.id), status)


def given_in(turn: Turn, facts: Facts) -> Iterator[Item]:
    """Yield the items of a turn's input."""
    form, custom = form_of(facts), custom_calls(turn.conversation, facts)
    for i, message in enumerate(turn.messages):
        yield from said(message, form, f"{_digits(turn.id)}_i{i}", custom)


def said_as(parts: Iterable[Delta], form: ResponseForm, digits: str, status: str = "completed") -> Iterator[Item]:
    """Yield the items of an answer, as its stream had them.

    parts: as of `parts_of`. digits: of their ids. status: of the last item.
    """
    made = list(parts)
    if not made or made[-1].reasoning:
        made.append(Delta(0, ""))
    for count, part in enumerate(made):
        id_ = f"{digits}_{count}"
        if part.call is not None:
            item = form.call(id_, part.call.id, part.call.name, part.call.arguments)
        else:
            item = (form.reasoning if part.reasoning else form.message)(id_, part.text)
        yield item if count < len(made) - 1 else {**item, "status": status}


def _status(facts: Facts) -> str:
    """Return the status of the last item of an answer, by the facts of its turn."""
    if "finish_reason" not in facts:
        return "completed"  # of another protocol
    status, _ = ending(facts["finish_reason"], Usage(**facts["usage"]))
    return status


def custom_calls(messages: Sequence[Message], facts: Facts) -> frozenset[str]:
    """Return the ids of the calls of custom tools in a turn's messages."""
    names = {flat for flat, origin in facts.get("origins", {}).items() if origin[0] == "custom"}
    return frozenset(c.id for m in messages for c in m.tool_calls if c.name in names) if names else frozenset()


def said(message: Message, form: ResponseForm, digits: str, custom: frozenset[str]) -> Iterator[Item]:
    """Yield the items of a message of the input. custom: ids of calls of custom tools."""
    if message.tool_call_id is not None:
        kind = "custom_tool_call_output" if message.tool_call_id in custom else "function_call_output"
        prefix = "ctco" if kind.startswith("custom") else "fco"
        fields = {"call_id": message.tool_call_id, "output": message.content}
        yield {"id": f"{prefix}_{digits}", "type": kind, "status": "completed", **fields}
    elif message.role == "assistant":
        yield from said_as(parts_of(message, {}), form, digits)
    else:
        part = {"type": "input_text", "text": message.content}
        yield form.item("message", digits, role=message.role, content=[part])


def _digits(turn: str) -> str:
    return turn.partition("_")[2]


def _placed(id_: str) -> tuple[str, bool, int]:
    """Return (turn, True for an item of its input, index of its message), ("", False, 0) for an id of another form."""
    found = ITEM_ID.fullmatch(id_)
    if found is None:
        return "", False, 0
    given = found[2] == "i"
    return f"turn_{found[1]}", given, int(found[3]) if given else 0


def _is_long(facts: Facts) -> bool:
    """Return True if a turn is to be read in blocks. Of custom tools the kind of a result is told by all its calls."""
    return "blocks" in facts and not any(origin[0] == "custom" for origin in facts.get("origins", {}).values())
