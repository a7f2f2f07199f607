"""The parser of the text between a call's markers, as it comes: the part that all notations share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal

from ssmd.text.calls.parts import CallArguments, CallEnd, CallStart, Part

SPACES = " \t\r\n"
State = Literal["open", "done", "failed"]


class Body(ABC):
    """The parser of calls in one notation, fed with text until its state is no longer `open`.

    unsaid: text taken in that belongs to no reported call. If the body fails, it is plain text again.
    calling: a call was reported and is unfinished.
    """

    def __init__(self) -> None:
        self.state: State = "open"
        self.calling = False
        self._unsaid: list[str] = []
        self._arguments: list[str] = []

    @property
    def unsaid(self) -> str:
        return "".join(self._unsaid)

    @abstractmethod
    def push(self, text: str, at: int, out: list[Part]) -> int:
        """Take in a text from `at` on and append its parts to `out`. Return where the rest begins.

        If the body fails, `unsaid` holds the text up to the wrong character.
        """

    def end(self, out: list[Part]) -> None:
        """End the text. An unfinished call is reported as cut off."""
        if self.calling:
            self._ended(out, whole=False)
        if self.state == "open":
            self.state = "failed"

    def _begun(self, name: str, out: list[Part]) -> None:
        out.append(CallStart(name))
        self._unsaid.clear()
        self.calling = True

    def _argued(self, text: str, out: list[Part]) -> None:
        if text:
            self._arguments.append(text)
            out.append(CallArguments(text))

    def _ended(self, out: list[Part], *, whole: bool = True) -> None:
        out.append(CallEnd(whole and _is_object("".join(self._arguments))))
        self._unsaid.clear()
        self._arguments.clear()
        self.calling = False

    def _break(self, out: list[Part]) -> None:
        """Fail at a character that is not allowed here. A reported call ends before it."""
        if self.calling:
            behind = self.unsaid
            self._ended(out)
            self._unsaid.append(behind)
        self.state = "failed"


class CallSequence(Body):
    """The parser of calls one after the other. one: makes the parser of each call.

    opening, closing: text around all of them, or "". between: one of these characters stands between two calls.
    """

    def __init__(self, one: Callable[[], Body], opening: str = "", between: str = "", closing: str = "") -> None:
        super().__init__()
        self._one, self._opening, self._between, self._closing = one, opening, between, closing
        self._inner: Body | None = None
        self._expects = "opening" if opening else "call"
        self._calls = 0

    @property
    def unsaid(self) -> str:
        return super().unsaid + ("" if self._inner is None else self._inner.unsaid)

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while at < len(text) and self.state == "open":
            if self._inner is not None:
                at = self._push_inner(self._inner, text, at, out)
                continue
            char = text[at]
            if char in SPACES:
                pass
            elif self._expects == "opening" and char == self._opening:
                self._expects = "call"
            elif self._expects == "more" and char == self._closing:
                self.state = "done"
            elif self._expects == "more" and char in self._between:
                self._expects = "call"
            elif self._expects == "call" or (self._expects == "more" and not self._between):
                self._inner = self._one()
                continue
            else:
                self.state = "failed"
                return at
            self._unsaid.append(char)
            at += 1
        return at

    def _push_inner(self, inner: Body, text: str, at: int, out: list[Part]) -> int:
        told = len(out)
        at = inner.push(text, at, out)
        self.calling = inner.calling
        if any(isinstance(part, CallStart) for part in out[told:]):
            self._unsaid.clear()
        if inner.state == "done":
            self._inner, self._expects = None, "more"
            self._calls += 1
        elif inner.state == "failed":
            self._unsaid.append(inner.unsaid)
            self._inner = None
            self.state = "failed"
        return at

    def end(self, out: list[Part]) -> None:
        if self._inner is not None:
            self._inner.end(out)
            self.calling = False
            self._unsaid.append(self._inner.unsaid)
            self._inner = None
        self.state = "done" if self._expects == "more" else "failed"


class NotationChoice(Body):
    """The parser of one of several notations, chosen by the first character or the first two; "" for all others."""

    def __init__(self, bodies: Mapping[str, Callable[[], Body]]) -> None:
        super().__init__()
        self._bodies = bodies
        self._head = ""  # without the spaces
        self._inner: Body | None = None

    @property
    def unsaid(self) -> str:
        return super().unsaid if self._inner is None else self._inner.unsaid

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while self._inner is None and at < len(text):
            char = text[at]
            self._unsaid.append(char)
            at += 1
            if char not in SPACES:
                self._head += char
                if len(self._head) == 2 or not any(len(key) == 2 and key[0] == char for key in self._bodies):
                    self._choose(out)
        return self._push_inner(text, at, out) if self._inner is not None and self.state == "open" else at

    def _choose(self, out: list[Part]) -> None:
        heads = (self._head, self._head[0], "")
        self._inner = self._bodies[next(head for head in heads if head in self._bodies)]()
        told = super().unsaid
        rest = self._push_inner(told, 0, out)
        if rest < len(told):  # it failed inside this text: the rest is plain text too
            self._inner._unsaid.append(told[rest:])

    def _push_inner(self, text: str, at: int, out: list[Part]) -> int:
        assert self._inner is not None
        at = self._inner.push(text, at, out)
        self.state, self.calling = self._inner.state, self._inner.calling
        return at

    def end(self, out: list[Part]) -> None:
        if self._inner is not None:
            self._inner.end(out)
        self.calling = False
        self.state = "failed" if self._inner is None else self._inner.state


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
