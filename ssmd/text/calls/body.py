"""The parser of the text between a call's markers, as it comes: the part that all notations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from ssmd.text.calls.parts import CallArguments, CallEnd, CallStart, Part
from ssmd.text.calls.value import SPACES

State = Literal["open", "done", "failed"]


class Body(ABC):
    """The parser of calls in one notation, fed with text until its state is no longer `open`.

    A call that was reported ends whole, whatever follows. calling: a call was reported and is unfinished.
    unsaid: text taken in that belongs to no call. It is content once the body is over.
    """

    def __init__(self) -> None:
        self.state: State = "open"
        self.calling = False
        self._unsaid: list[str] = []

    @property
    def unsaid(self) -> str:
        return "".join(self._unsaid)

    @property
    @abstractmethod
    def quoted(self) -> bool:
        """True if the next character belongs to a string."""

    @property
    def raw(self) -> bool:
        """True if that string stands without quotes, so that a marker may be its text: only the body finds its end."""
        return False

    @abstractmethod
    def push(self, text: str, at: int, out: list[Part]) -> int:
        """Take in a text from `at` on and append its parts to `out`. Return where the rest begins.

        If the body fails, `unsaid` holds the text up to the wrong character.
        """

    @abstractmethod
    def end(self, out: list[Part]) -> None:
        """End the text: complete an unfinished call, or fail if its name or its arguments are unknown."""

    def _begun(self, name: str, out: list[Part]) -> None:
        out.append(CallStart(name))
        self._unsaid.clear()
        self.calling = True

    def _argued(self, text: str, out: list[Part]) -> None:
        if text:
            out.append(CallArguments(text))

    def _ended(self, out: list[Part]) -> None:
        out.append(CallEnd(True))
        self.calling = False
        self.state = "done"


class CallSequence(Body):
    """The parser of all calls behind one marker, with or without brackets, commas or semicolons around them.

    object_: makes the parser of a call that begins with a brace. named: of one that begins with a name. tagged: of one
    that begins with a tag. calls: the number of complete calls.
    """

    def __init__(
        self,
        object_: Callable[[], Body],
        named: Callable[[], Body] | None = None,
        tagged: Callable[[], Body] | None = None,
    ) -> None:
        super().__init__()
        self._object, self._named, self._tagged = object_, named, tagged
        self._inner: Body | None = None
        self.calls = 0

    @property
    def unsaid(self) -> str:
        return super().unsaid + ("" if self._inner is None else self._inner.unsaid)

    @property
    def quoted(self) -> bool:
        return self._inner is not None and self._inner.quoted

    @property
    def raw(self) -> bool:
        return self._inner is not None and self._inner.raw

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while at < len(text) and self.state == "open":
            if self._inner is not None:
                at = self._push_inner(self._inner, text, at, out)
                continue
            char = text[at]
            if char == "{":
                self._inner = self._object()
            elif self._named is not None and (char.isalpha() or char == "_"):
                self._inner = self._named()
            elif self._tagged is not None and char == "<":
                self._inner = self._tagged()
            elif char in SPACES or char in "[(" or (self.calls and char in ",;"):
                self._unsaid.append(char)
                at += 1
            elif self.calls and char in "}])":  # also one too many
                self._unsaid.clear()
                at += 1
            else:
                self.state = "done" if self.calls else "failed"
        return at

    def _push_inner(self, inner: Body, text: str, at: int, out: list[Part]) -> int:
        told = len(out)
        at = inner.push(text, at, out)
        if len(out) > told:  # a call was reported, even if it is over and the next one has begun
            self._unsaid.clear()
        if inner.state != "open" or inner.calling != self.calling:
            self._note(inner)
        return at

    def _note(self, inner: Body) -> None:
        """Note that a call was reported, or is over."""
        self.calling = inner.calling
        if inner.calling or inner.state == "done":
            self._unsaid.clear()
        if inner.state == "open":
            return
        self._inner = None
        if inner.state == "done":
            self.calls += 1
        else:
            self._unsaid.append(inner.unsaid)
            self.state = "failed"

    def end(self, out: list[Part], *, cut: bool = False) -> None:
        """End the text. cut: the answer did not come to its end, so an unfinished call stays as far as it came."""
        inner = self._inner
        if inner is not None and cut:
            self._unsaid.append(inner.unsaid)
            self._inner, self.state = None, "failed"
            if self.calling:
                out.append(CallEnd(False))
                self.calling, self.state = False, "done"
        elif inner is not None:
            inner.end(out)
            self._note(inner)
        if self.state == "open":
            self.state = "done" if self.calls else "failed"
            if self.calls:
                self._unsaid.clear()
