"""Tool calls in what an answer says, told from the text around them as both come.

Nothing of a marker is sent, nor what may become one. A call that is malformed before its name and the beginning of its
arguments are there is text, with its markers; one that breaks later stays a call, as far as it came, and what follows
that place is text.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Literal

from ssmd.text.calls.body import SPACES, Body, Chosen
from ssmd.text.calls.formats import Format
from ssmd.text.calls.parts import Begun, Ended, Part, Said
from ssmd.text.markers import first, may_become

SEARCHED = 1024  # characters of what was no call in which another one is looked for: trying all is quadratic


class CallReader:
    """One answer's calls. names: of the tools that there are. start: nothing was said before.

    controls: the markers that are control tokens: they come by `mark`, and their text is text like any other. Spaces
    before a call, and at the end after one, are the call's.
    """

    def __init__(self, format_: Format, names: Collection[str], *, start: bool, controls: Collection[str] = ()) -> None:
        self._format, self._names = format_, names
        bare = format_.bare and start
        self._state: Literal["start", "text", "call", "after"] = "start" if bare else "text"
        self._openings = [marker for marker in format_.openings if marker not in controls]
        self._closings = [format_.closing] if format_.closing and format_.closing not in controls else []
        self._held = ""  # what may become a marker
        self._spaces: list[str] = []  # behind the last word
        self._marker = ""  # what the call began with, while it may be text
        self._body: Body | None = None
        self._said: list[str] = []
        self._over: list[bool] = []  # of each call that is over: whether it is whole

    @property
    def said(self) -> str:
        """All that was said so far, without the calls."""
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
        """Take in text, and append to `out` what it tells."""
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
        """Take in a control token by its text; False: it is no marker here, and nothing was done."""
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
        """Nothing more comes: what was held back is told as what it is by now. in_call: it is of a call that is cut,
        and nothing that is said.
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
        """The answer's first word: it may be a call without a marker."""
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
        """Say a text but for the spaces at its end: what follows tells whether they are said."""
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
            out.append(Said(text))

    def _open(self, marker: str) -> None:
        names = self._names
        self._body = Chosen({head: partial(body, names) for head, body in self._format.bodies.items()})
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
            if isinstance(part, Begun):
                self._spaces.clear()
                self._marker = ""
            elif isinstance(part, Ended):
                self._over.append(part.whole)
        out += parts

    def _give_back(self, body: Body, out: list[Part]) -> str:
        """What was no call is text: its marker, and what came after it, which is returned where it may hold one."""
        self._body, self._state = None, "text"
        if self._marker:
            self._words(self._marker, out)
        if len(body.unsaid) <= SEARCHED:
            return body.unsaid
        self._words(body.unsaid, out)
        return ""

    def _end_body(self, out: list[Part]) -> bool:
        """The call's end has come, whatever is missing; whether nothing is."""
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
        """A marker where a call may not have one ends it."""
        whole = self._end_body(out)
        if marker in self._format.openings:
            self._open(marker)
        elif not whole:
            self._words(marker, out)

    def _after(self, text: str) -> str:
        """What follows a call: its closing marker, if there is one, or anything else."""
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
        """A call's last marker has come."""
        self._spaces.clear()
        self._state = "text"

    def _release(self, out: list[Part]) -> None:
        """What might have become a marker does not."""
        held, self._held = self._held, ""
        self._words(held, out)
