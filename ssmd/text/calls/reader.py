"""The parser that separates an answer's tool calls from the text around them, as both come.

Markers are not sent, and text that may become one waits. A call that is malformed before its name and the beginning of
its arguments is sent as text, with its markers. A call that breaks later stays a call up to there; the rest is text.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Literal

from ssmd.text.calls.body import SPACES, Body, NotationChoice
from ssmd.text.calls.formats import Format
from ssmd.text.calls.parts import CallEnd, CallStart, Part, TextPart
from ssmd.text.markers import first, may_become

SEARCHED = 1024  # characters of a failed call that are searched for another call: searching all would be quadratic


class CallReader:
    """The reader of one answer's calls. Spaces before a call, and at the end after one, are not content.

    names: names of the tools. start: the answer has no content yet. controls: the markers that are control tokens;
    `mark` takes them in, and their text is plain text.
    """

    def __init__(self, format_: Format, names: Collection[str], *, start: bool, controls: Collection[str] = ()) -> None:
        self._format, self._names = format_, names
        bare = format_.bare and start
        self._state: Literal["start", "text", "call", "after"] = "start" if bare else "text"
        self._openings = [marker for marker in format_.openings if marker not in controls]
        self._closings = [format_.closing] if format_.closing and format_.closing not in controls else []
        self._held = ""  # what may become a marker
        self._spaces: list[str] = []  # after the last word
        self._marker = ""  # the call's first marker, while the call may still turn out to be text
        self._body: Body | None = None
        self._said: list[str] = []
        self._over: list[bool] = []  # for each finished call: True if it is complete

    @property
    def said(self) -> str:
        """The content so far, without the calls."""
        return "".join(self._said)

    @property
    def holds(self) -> bool:
        """True if some text is still held back, or a call is unfinished."""
        return bool(self._held) or any(self._spaces) or self._body is not None

    @property
    def speaks(self) -> bool:
        """True if the next text may be content."""
        return self._state in ("start", "text")

    @property
    def begun(self) -> str | None:
        """The text after the marker of a call whose tool is still unknown; None if there is no such call."""
        return self._body.unsaid if self._body is not None and self._marker else None

    @property
    def calling(self) -> bool:
        """True if a call was reported and is unfinished."""
        return self._body is not None and self._body.calling

    @property
    def in_call(self) -> bool:
        """True if the next text belongs to a call, or to a marker that begins one."""
        return self._state in ("call", "after") or bool(self._held)

    @property
    def over(self) -> int:
        """The number of finished calls."""
        return len(self._over)

    @property
    def whole(self) -> bool:
        """True if there were calls, and all of them are complete."""
        return bool(self._over) and all(self._over)

    def push(self, text: str, out: list[Part]) -> None:
        """Take in text, and append its parts to `out`."""
        while text:
            if self._state == "start":
                text = self._start(text)
            elif self._state == "text":
                text = self._read(text, out)
            elif self._state == "call":
                text = self._call(text, out)
            else:
                text = self._after(text)

    def mark(self, marker: str, out: list[Part]) -> bool:
        """Take in a control token by its text. Returns False, and does nothing, if it is not a marker here."""
        if marker not in self._format.markers:
            return False
        if self._body is not None and marker in self._format.inner:
            self.push(marker, out)
        elif self._state == "after" and marker == self._format.closing:
            self._settle()
        elif self._body is None and marker in self._format.openings:
            self._release(out)
            self._open(marker)
        elif self._body is None:
            return False
        else:
            self._break(marker, out)
        return True

    def end(self, out: list[Part], *, in_call: bool = False) -> None:
        """End the answer, and append the parts of the text that was held back.

        in_call: that text belongs to a call that is cut off, so it is not content.
        """
        if self._body is not None and in_call:
            parts: list[Part] = []
            self._body.end(parts)
            self._note(parts, out)
            self._body = None
        elif self._body is not None:
            self._end_body(out)
        if self._state == "after" or in_call:
            self._held = ""  # a part of the call's last marker, or of its first
        if in_call:
            self._spaces.clear()
        self._release(out)
        if not self._over:
            self._say("", out)
        self._spaces.clear()

    def _start(self, text: str) -> str:
        """Take in the answer's beginning, and return the rest: its first word may begin a call without a marker."""
        rest = text.lstrip(SPACES)
        self._spaces.append(text[: len(text) - len(rest)])
        if rest:
            self._state = "text"
            if rest[0] == "{":
                self._open("")
        return rest

    def _read(self, text: str, out: list[Part]) -> str:
        text, self._held = self._held + text, ""
        at, marker = first(text, self._openings)
        if marker:
            self._words(text[:at], out)
            self._open(marker)
            return text[at + len(marker) :]
        at -= may_become(text, self._openings)
        self._held = text[at:]
        self._words(text[:at], out)
        return ""

    def _words(self, text: str, out: list[Part]) -> None:
        """Append a text as content, without the spaces at its end: the next text decides if they are content."""
        words = text.rstrip(SPACES)
        if words:
            self._say(words, out)
        if len(words) < len(text):
            self._spaces.append(text[len(words) :])

    def _say(self, text: str, out: list[Part]) -> None:
        text = "".join([*self._spaces, text])
        self._spaces.clear()
        if text:
            self._said.append(text)
            out.append(TextPart(text))

    def _open(self, marker: str) -> None:
        names = self._names
        self._body = NotationChoice({head: partial(body, names) for head, body in self._format.bodies.items()})
        self._marker, self._state = marker, "call"

    def _call(self, text: str, out: list[Part]) -> str:
        body = self._body
        assert body is not None
        parts: list[Part] = []
        at = body.push(text, 0, parts)
        self._note(parts, out)
        if body.state == "done":
            self._body, self._state = None, "after"
        elif body.state == "failed":
            return self._give_back(body, out) + text[at:]
        return text[at:]

    def _note(self, parts: list[Part], out: list[Part]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self._spaces.clear()
                self._marker = ""
            elif isinstance(part, CallEnd):
                self._over.append(part.whole)
        out += parts

    def _give_back(self, body: Body, out: list[Part]) -> str:
        """Turn a failed call into text, with its marker. Return the text after it if that may hold another call."""
        self._body, self._state = None, "text"
        if self._marker:
            self._words(self._marker, out)
        if len(body.unsaid) <= SEARCHED:
            return body.unsaid
        self._words(body.unsaid, out)
        return ""

    def _end_body(self, out: list[Part]) -> bool:
        """End the call, complete or not. Return True if it is complete."""
        body = self._body
        assert body is not None
        parts: list[Part] = []
        body.end(parts)
        self._note(parts, out)
        if body.state == "done":
            self._body, self._state = None, "text"
            return True
        self._words(self._give_back(body, out), out)
        return False

    def _break(self, marker: str, out: list[Part]) -> None:
        """End the call at a marker that is not allowed inside it."""
        whole = self._end_body(out)
        if marker in self._format.openings:
            self._open(marker)
        elif not whole:
            self._words(marker, out)

    def _after(self, text: str) -> str:
        """Take in the text after a call, and return the rest: it may begin with the closing marker."""
        if not self._held:
            rest = text.lstrip(SPACES)
            self._spaces.append(text[: len(text) - len(rest)])
            text = rest
        text, self._held = self._held + text, ""
        for marker in self._closings:
            if text.startswith(marker):
                self._settle()
                return text[len(marker) :]
            if marker.startswith(text):
                self._held = text
                return ""
        if text:
            self._state = "text"
        return text

    def _settle(self) -> None:
        """Note that a call's closing marker has come."""
        self._spaces.clear()
        self._state = "text"

    def _release(self, out: list[Part]) -> None:
        """Append the text that was held back as a possible marker: it is content."""
        held, self._held = self._held, ""
        self._words(held, out)
