"""Chat templates whose text only grows, rendered from a message on. Any other template is refused.

Instead of a list of messages the template gets an object. It refuses every operation whose result could change with
later messages, or needs a message that was skipped. docs/architecture.md has the proof.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.runtime import LoopContext

from ssmd.text.jinja.compiling import AppendError, AppendTransformer
from ssmd.text.jinja.meter import Meter
from ssmd.text.jinja.sandbox import Sandbox, TemplateFunction, TemplateNamespace

_BEFORE = -1  # the loop's turn while it has not begun


class Flow:
    """The progress of one rendering through a conversation, of which it has the first message and those from `skipped`.

    turn: number of the message in the loop's present turn. ended: the loop is over. begins: characters put out before
    message `skipped`. settled: the last message such that no earlier turn read it or a later one, and the characters
    put out before it.
    """

    def __init__(self, first: Mapping[str, Any], skipped: int, rest: Sequence[Mapping[str, Any]], meter: Meter) -> None:
        self.first, self.skipped, self.rest = first, skipped, rest
        self.count = skipped + len(rest)
        self.turn = _BEFORE
        self.ended = False
        self.looping = False
        self.peeked = False
        self.refused = False
        self.begins: int | None = None
        self.settled: tuple[int, int] | None = None
        self._opened = False
        self._meter = meter

    def refuse(self, what: str) -> NoReturn:
        """Raise AppendError, and remember it: Jinja's tests swallow what is raised in them."""
        self.refused = True
        raise AppendError(f"the chat template asks for {what}")

    def open(self, start: int) -> Iterator[Mapping[str, Any]]:
        """Return an iterator over the messages from number `start` on, for the only loop over them."""
        if self._opened:
            self.refuse("the messages once more")
        if self.skipped and start > self.skipped:
            self.refuse("fewer messages than there are")
        self._opened = self.looping = True
        self.turn = max(start, self.skipped) - 1
        return self._each(max(start - self.skipped, 0))

    def _each(self, at: int) -> Iterator[Mapping[str, Any]]:
        while at < len(self.rest):
            yield self.rest[at]
            at += 1
        self.ended = True

    def mark(self) -> None:
        """Note that the next message's turn begins: all text before it has been put out."""
        self.turn += 1
        if self.begins is None:
            self.begins = self._meter.written
        if not self.peeked and self.turn:
            self.settled = self.turn, self._meter.written
        self.peeked = False


class MessageTail:
    """The list of messages from number `start` on, limited to the operations that a template may use."""

    __slots__ = ("_flow", "_start")

    def __init__(self, flow: Flow, start: int = 0) -> None:
        self._flow, self._start = flow, start

    def __getitem__(self, key: Any) -> Any:
        flow, start = self._flow, self._start
        if isinstance(key, slice):
            more = 0 if key.start is None else key.start
            if key.stop is key.step is None and type(more) is int and more >= 0:
                return MessageTail(flow, start + more)
        elif type(key) is int:
            if key == start == 0:
                return flow.first
            if flow.ended and start < flow.count and key in (-1, flow.count - start - 1):
                return flow.rest[-1]
        flow.refuse(f"messages[{key!r}]" if isinstance(key, int) else "messages by something else than a number")

    def __len__(self) -> int:
        if not self._flow.ended:
            self._flow.refuse("the number of messages")
        return max(0, self._flow.count - self._start)

    def __bool__(self) -> bool:
        # Conversations here have two messages or more: the first rendering requires it, and others continue one.
        return self._start <= 1 or len(self) > 0

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        self._flow.refuse("the messages after the first, but not to put them out one by one")

    def __eq__(self, other: object) -> bool:
        self._flow.refuse("a comparison of messages")

    def __repr__(self) -> str:
        self._flow.refuse("the messages as a text")

    def __getattr__(self, name: str) -> NoReturn:
        self._flow.refuse(f"messages.{name}")


class MessageLoop:
    """The messages of a loop, one by one. missing: number of its first turns that are skipped."""

    def __init__(self, said: MessageTail) -> None:
        self.flow = said._flow
        self.missing = max(0, self.flow.skipped - said._start)
        self._iterator = self.flow.open(said._start)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def attribute(self, loop: LoopContext, name: str) -> Any:
        """Return the attribute of `loop` with this name, counted as if no turn were skipped."""
        if name in ("last", "depth", "depth0"):
            return getattr(loop, name)
        index0 = loop.index0 + self.missing
        if name in ("index0", "index"):
            return index0 + (name == "index")
        if name == "first":
            return index0 == 0
        if name == "cycle":
            return TemplateFunction(lambda *args: args[index0 % len(args)])
        if name == "nextitem":
            self.flow.peeked = True
            return loop.nextitem
        if name == "previtem" and not (self.missing and loop.first):
            return loop.previtem
        self.flow.refuse(f"loop.{name}")


class IterationNamespace(TemplateNamespace):
    """A namespace that changes only in the turn of the loop in which it was made."""

    def __init__(self, flow: Flow, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(*args, **kwargs)
        self._flow, self._turn = flow, flow.turn

    def __setitem__(self, name: str, value: Any) -> None:
        # Bypass Namespace's attribute lookup: it finds only the template's own names.
        flow, turn = (object.__getattribute__(self, own) for own in ("_flow", "_turn"))
        if turn != flow.turn and not flow.ended:
            flow.refuse(f"a namespace's {name!r} from one turn of the loop to the next")
        super().__setitem__(name, value)


class AppendingSandbox(Sandbox):
    """The sandbox for renderings whose text only grows, each with a flow of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._flows = threading.local()
        self.globals |= {
            "namespace": TemplateFunction(lambda *args, **kwargs: IterationNamespace(self.flow, args, kwargs)),
            "cycler": TemplateFunction(lambda *_, **__: self.flow.refuse("a cycler")),
            "joiner": TemplateFunction(lambda *_, **__: self.flow.refuse("a joiner")),
        }
        self.tests["sameas"] = self._same

    @property
    def flow(self) -> Flow:
        flow: Flow = self._flows.flow
        return flow

    @flow.setter
    def flow(self, flow: Flow | None) -> None:
        self._flows.flow = flow

    # Called by compiled templates.

    def each(self, items: Any) -> Any:
        """Return the iterable of a loop that writes to the output and has no other loop around it."""
        self.flow.looping = False
        return MessageLoop(items) if isinstance(items, MessageTail) else items

    def mark(self) -> None:
        """Begin a turn of such a loop."""
        if self.flow.looping:
            self.flow.mark()

    def asked(self, generate: Any) -> Any:
        """Return `add_generation_prompt`. It may be read only in the last message's turn or after the loop."""
        if not self.flow.ended and self.flow.turn != self.flow.count - 1:
            self.flow.refuse("add_generation_prompt before the last message")
        return generate

    def of_loop(self, loop: Any, name: str) -> Any:
        """Read an attribute of `loop`."""
        if isinstance(loop, LoopContext) and isinstance(loop._iterable, MessageLoop):
            return loop._iterable.attribute(loop, name)
        return self.getattr(loop, name)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = AppendTransformer().visit(super()._parse(source, name, filename))
        return template

    def _same(self, value: Any, other: Any) -> bool:
        """Test as Jinja's `is sameas`, but only against None and booleans: other identities depend on Python."""
        if not (other is None or isinstance(other, bool)):
            self.flow.refuse("the identity of values")
        return value is other

    def _paced(self, items: Iterator[Any]) -> Iterator[Any]:
        return self._kept(super()._paced(items), self.flow.turn)

    def _kept(self, items: Iterator[Any], turn: int) -> Iterator[Any]:
        """Yield items only in the loop's turn in which they were made: an iterator could carry state to later turns."""
        while True:
            if turn != self.flow.turn and not self.flow.ended:
                self.flow.refuse("a filter's items in several turns of the loop")
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
