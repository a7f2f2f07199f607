"""The parser that separates an answer's tool calls from the text around them, as both come.

Markers are not sent, and text that may become one waits. A call whose tool or arguments cannot be read is sent as text,
without its markers. Any other call is sent as a call, and its arguments are completed to a JSON object.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal

from ssmd.text.calls.body import CallSequence
from ssmd.text.calls.formats import Format
from ssmd.text.calls.parts import CallEnd, CallStart, Part, TextPart
from ssmd.text.calls.value import SPACES

_PIECE = 4096  # characters that are read at once: each marker copies the rest of its piece
_MOST_GAP = 64  # spaces after a marker in a string that are looked at to tell if it is the string's text


class CallReader:
    """The reader of one answer's calls. Spaces before a call, and at the end after one, are not content.

    tools: each tool's schema of its parameters, by name. start: the answer has no content yet.
    controls: the markers that are control tokens; `mark` takes them in, and their text is plain text.
    """

    def __init__(
        self, format_: Format, tools: Mapping[str, Any], *, start: bool, controls: Collection[str] = ()
    ) -> None:
        self._format, self._tools = format_, tools
        bare = format_.bare and start
        self._state: Literal["start", "text", "call"] = "start" if bare else "text"
        self._openings = tuple(marker for marker in format_.openings if marker not in controls)
        spelt = self._openings + tuple(marker for marker in format_.closings if marker not in controls)
        self._spelt = self._in_text = _patterns(spelt)
        # Markers inside a call may be words of an answer that has no call.
        self._after_call = _patterns(spelt + tuple(marker for marker in format_.inner if marker not in controls))
        self._no_content = _patterns(spelt + format_.inner)
        self._held = ""  # what may become a marker, or is one that may belong to a string
        self._dropped = False  # a marker came that is not content
        self._joint = False  # one came after the last content
        self._spaces: list[str] = []  # after the last word
        self._marker = ""  # the call's first marker, while the call may still turn out to be text
        self._body: CallSequence | None = None
        self._last = ""  # the last character that the body was given
        self._said: list[str] = []
        self._over: list[bool] = []  # for each finished call: True if it is complete

    @property
    def said(self) -> str:
        """The content so far, without the calls."""
        return "".join(self._said)

    @property
    def holds(self) -> bool:
        """True if some text is still held back, or a call is unfinished."""
        unfinished = self._body is not None and (not self._body.calls or self._body.calling or bool(self._body.unsaid))
        return bool(self._held) or any(self._spaces) or unfinished

    @property
    def speaks(self) -> bool:
        """True if the next text may be content."""
        return self._state in ("start", "text")

    @property
    def begun(self) -> str | None:
        """The text after the marker of a call whose tool is still unknown; None if there is no such call."""
        return self._body.unsaid + self._held if self._body is not None and self._marker else None

    @property
    def calling(self) -> bool:
        """True if a call was reported and is unfinished."""
        return self._body is not None and self._body.calling

    @property
    def in_call(self) -> bool:
        """True if the next text belongs to a call, or to a marker that begins one."""
        return self._body is not None or bool(self._held)

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
        if len(text) > _PIECE:
            for at in range(0, len(text), _PIECE):
                self.push(text[at : at + _PIECE], out)
            return
        while text:
            if self._state == "start":
                text = self._start(text)
            elif self._state == "text":
                text = self._read(text, out)
            else:
                text = self._call(text, out)

    def mark(self, marker: str, out: list[Part]) -> bool:
        """Take in a control token by its text. Returns False, and does nothing, if it is not a marker here."""
        if marker not in self._format.markers or (self._body is None and marker not in self._format.openings):
            return False
        self._release(out)
        if self._body is None:
            self._open(marker)
        elif marker in self._format.inner:
            self._feed(marker, out)
        else:
            self._break(marker, out)
        return True

    def end(self, out: list[Part], *, in_call: bool = False, cut: bool = False) -> None:
        """End the answer, and append the parts of the text that was held back.

        cut: the answer did not come to its end, so an unfinished call stays as far as it came.
        in_call: the text that is held back belongs to a call that is cut off, so it is not content.
        """
        if in_call:
            self._held = ""
        self._release(out, at_end=True, cut=cut)
        if self._body is not None:
            self._end_body(out, cut=cut, in_call=in_call)
        if in_call:
            self._spaces.clear()
        if not self._over and not self._dropped:
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
        if not self._held and not self._in_text.first(text):
            self._words(text, out)
            return ""
        text, self._held = self._held + text, ""
        found = self._in_text.whole.search(text)
        if found is not None:
            self._words(text[: found.start()], out)
            self._meet(found[0])
            return text[found.end() :]
        at = self._in_text.beginning(text)
        self._held = text[at:]
        self._words(text[:at], out)
        return ""

    def _meet(self, marker: str) -> None:
        """Open a call at its marker. A marker that ends none is dropped."""
        self._dropped = self._joint = True
        if marker in self._format.openings:
            self._open(marker)

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
        if text and self._joint:
            self._joint = False
            text = text if text[0] in SPACES else self._apart() + text
        if text:
            self._said.append(text)
            out.append(TextPart(text))

    def _apart(self) -> str:
        """Return a space if the content ends as a marker begins: with a marker taken out, none may come together."""
        end = ""
        for text in reversed(self._said):
            end = text + end
            if len(end) >= self._no_content.longest:
                break
        return " " if self._no_content.beginning(end) < len(end) else ""

    def _open(self, marker: str) -> None:
        self._body = self._format.body(self._tools)
        self._marker, self._state, self._last = marker, "call", ""
        if marker:
            self._in_text = self._after_call

    def _call(self, text: str, out: list[Part]) -> str:
        """Give the body a text up to the next marker. Return the text after that."""
        if not self._held and not self._spelt.first(text):
            return self._feed(text, out)
        text, self._held = self._held + text, ""
        found = self._spelt.whole.search(text)
        if found is None:
            at = self._spelt.beginning(text)
            rest = self._feed(text[:at], out)
            if self._body is None:
                return rest + text[at:]
            self._held = text[at:]
            return ""
        rest = self._feed(text[: found.start()], out)
        if self._body is None:  # it ended before the marker
            return rest + text[found.start() :]
        within = self._within(text, found)
        if within is None:
            self._held = text[found.start() :]
            return ""
        if within:
            rest = self._feed(found[0], out)
            return rest + text[found.end() :]
        self._break(found[0], out)
        return text[found.end() :]

    def _within(self, text: str, found: re.Match[str]) -> bool | None:
        """Return True if a marker is the text of a string, None if the text after it has to tell.

        A string in quotes cannot have a line break before it, nor a line break and another call behind it. It has to go
        on.
        """
        assert self._body is not None
        if self._body.raw:
            return True
        if not self._body.quoted or self._last == "\n":
            return False
        rest = text[found.end() :]
        behind = rest.lstrip(SPACES)
        gap = rest[: len(rest) - len(behind)]
        if len(gap) > _MOST_GAP:
            return True
        if not behind:
            return None
        if "\n" not in gap or found[0] in self._openings:
            return True
        if behind.startswith(self._openings):
            return False
        return None if any(opening.startswith(behind) for opening in self._openings) else True

    def _feed(self, text: str, out: list[Part]) -> str:
        """Give the body a text. Return what follows its end."""
        body = self._body
        assert body is not None
        if not text:
            return ""
        told = len(out)
        at = body.push(text, 0, out)
        self._last = text[-1]
        self._note(out, told)
        if body.state == "open":
            return ""
        self._body, self._state = None, "text"
        self._give_back(body.unsaid, out)
        return text[at:]

    def _note(self, out: list[Part], told: int) -> None:
        """Note the parts that came after the first `told`."""
        for i in range(told, len(out)):
            part = out[i]
            if type(part) is CallStart:
                self._spaces.clear()
                self._marker = ""
            elif type(part) is CallEnd:
                self._over.append(part.whole)

    def _break(self, marker: str, out: list[Part]) -> None:
        """End the call at a marker."""
        self._end_body(out)
        self._meet(marker)

    def _end_body(self, out: list[Part], *, cut: bool = False, in_call: bool = False) -> None:
        body = self._body
        assert body is not None
        self._body, self._state = None, "text"
        told = len(out)
        body.end(out, cut=cut)
        self._note(out, told)
        self._give_back("" if in_call else body.unsaid, out)

    def _give_back(self, text: str, out: list[Part]) -> None:
        """Turn text of a body into content, without the markers that stand in its strings."""
        for i, part in enumerate(self._no_content.whole.split(text)):
            self._dropped = self._dropped or i > 0
            self._joint = self._joint or i > 0
            self._words(part, out)

    def _release(self, out: list[Part], *, at_end: bool = False, cut: bool = False) -> None:
        """Use the text that was held back as a possible marker."""
        held, self._held = self._held, ""
        if not held:
            return
        found = self._spelt.whole.match(held)
        if self._body is None:
            self._words(held, out)
        elif found is not None:
            if not cut:
                self._break(found[0], out)
        elif self._body.quoted or not at_end:
            self._words(self._feed(held, out), out)
        elif not self._body.calling and not self._body.calls:
            self._end_body(out, cut=cut)
            self._words(held, out)


class _Patterns:
    """The patterns of some markers. first: finds their first characters. longest: characters of the longest."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.longest = max(map(len, markers), default=0)
        beginnings = sorted({marker[:n] for marker in markers for n in range(1, len(marker))}, key=len, reverse=True)
        firsts = "".join(re.escape(char) for char in sorted({marker[0] for marker in markers}))
        self.first = re.compile(f"[{firsts}]" if firsts else "(?!)").search
        self.whole = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        self._beginning = re.compile(rf"(?:{'|'.join(map(re.escape, beginnings))})\Z" if markers else "(?!)")

    def beginning(self, text: str) -> int:
        """Return where the end of a text may begin a marker; its length if it does not."""
        found = self._beginning.search(text, max(0, len(text) - self.longest))
        return len(text) if found is None else found.start()


_patterns = cache(_Patterns)
