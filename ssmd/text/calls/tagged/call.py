"""The parser of a call whose arguments stand in tags, as Qwen3-Coder, Qwen3.5 and Nemotron 3 write it.

`<function=NAME>`, then for each argument `<parameter=KEY>`, its value on lines of its own and `</parameter>`, then
`</function>`. A string stands as it is, without quotes or escapes, so the tool's schema decides what a value is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from typing import Any, Literal

from ssmd.text.calls.body import Body
from ssmd.text.calls.parts import Part
from ssmd.text.calls.scalar import inner, quoted
from ssmd.text.calls.tagged.kinds import CONSTANTS, TEXT, kinds_of, read_value
from ssmd.text.calls.value import SPACES, Value

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
CALL_END = "</tool_call>"
MOST_NAME = 256  # characters
_AROUND_NAMES = " \"'"
_NAME = re.compile(r"[^<>\n]*")
Way = Literal["", "string", "json", "at its end"]
Step = tuple[str, str]  # patterns of a text, and of all that it may begin with, which may be empty


def _tag(*tags: str) -> Step:
    beginnings = sorted({tag[:n] for tag in tags for n in range(len(tag))}, reverse=True)
    return f"(?:{'|'.join(tags)})", f"(?:{'|'.join(beginnings)})"


_BREAK: Step = ("\n", "")
_MAYBE_BREAK: Step = ("\n?", "")
_GAP: Step = (r"[ \t\r\n]{0,64}", r"[ \t\r\n]{0,64}")
_KEY: Step = (rf"([^<>\n]{{1,{MOST_NAME}}})", rf"[^<>\n]{{0,{MOST_NAME}}}")
# The ends of a value, each with the steps behind it that it stands before; without them it is the value's text. These
# are its last tag before another one, the call's last tags without it, and the tag of the next argument without it.
_ENDS: tuple[tuple[tuple[Step, ...], tuple[Step, ...]], ...] = (
    ((_MAYBE_BREAK, _tag(PARAMETER_END), _GAP), (_tag(PARAMETER, FUNCTION_END, FUNCTION, CALL_END),)),
    ((_MAYBE_BREAK,), (_tag(FUNCTION_END), _GAP, _tag(CALL_END))),
    ((_BREAK,), (_tag(PARAMETER), _KEY, _tag(">"))),
)
# Patterns of texts that would end a value, each with what is behind it, and of some more: they have no counts, as
# grammars cannot exclude these cheaply.
END_PATTERNS = tuple(re.sub(r"\{\d+,\d+\}", "*", "".join(t for t, _ in (*end, *behind))) for end, behind in _ENDS)
_END = re.compile("|".join(f"{''.join(t for t, _ in end)}(?={''.join(t for t, _ in behind)})" for end, behind in _ENDS))
_LONGEST = 2 * MOST_NAME  # characters of an end with what is behind it, at most


@cache
def _beginning() -> re.Pattern[str]:
    """Return the pattern of a text's end that may begin the end of a value."""
    found = []
    for end, behind in _ENDS:
        steps = (*end, *behind)
        found += ["".join(text for text, _ in steps[:i]) + begun for i, (_, begun) in enumerate(steps)]
    return re.compile(rf"(?:{'|'.join(found)})\Z")


class TaggedCall(Body):
    """The parser of one call. The call is reported at the end of its first tag.

    tools: the parameters' schema of each tool, by its name.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._expects: Literal["head", "tag", "line", "value"] = "head"  # line: the break before a value
        self._rest = ""  # text that was taken in and not read yet
        self._kinds: dict[str, frozenset[str]] = {}
        self._given: set[str] = set()  # names of the arguments that have come
        self._key = ""
        self._allowed = TEXT
        self._way: Way = ""  # how the value is written; "" while that is not known
        self._word = ""  # its beginning so far, until that is known
        self._words: list[str] = []  # the value, if it is written at its end
        self._json = Value()

    @property
    def quoted(self) -> bool:
        return self._expects in ("line", "value")

    @property
    def raw(self) -> bool:
        return self.quoted

    @property
    def unsaid(self) -> str:
        waits = self._rest if self._expects == "head" and self.state == "open" else ""
        return super().unsaid + waits

    def push(self, text: str, at: int, out: list[Part]) -> int:
        self._rest += text[at:]
        steps = {"head": self._head, "tag": self._tag, "line": self._line, "value": self._value}
        while self.state == "open" and steps[self._expects](out):
            pass
        # Of the text before this one, only spaces can be left.
        return len(text) if self.state == "open" else max(at, len(text) - len(self._rest))

    # Each step reads on in the rest, and returns False if more text must come first.

    def _head(self, out: list[Part]) -> bool:
        """Read the first tag."""
        rest = self._rest
        if not rest.startswith(FUNCTION):
            end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(rest, FUNCTION, strict=False)))
        else:
            found = _NAME.match(rest, len(FUNCTION))
            assert found is not None
            end = found.end()
            name = found[0].strip(_AROUND_NAMES)
            if rest.startswith(">", end) and name:
                self._rest, self._expects = rest[end + 1 :], "tag"
                self._kinds, self._given = kinds_of(self._tools.get(name)), set()
                self._begun(name, out)
                return True
        if end == len(rest) <= len(FUNCTION) + MOST_NAME:
            return False
        self._unsaid.append(rest[:end])
        self._rest, self.state = rest[end:], "failed"
        return True

    def _tag(self, out: list[Part]) -> bool:
        """Read up to the next tag. Text between the tags is left out."""
        at = self._rest.find("<")
        self._rest = self._rest[at:] if at >= 0 else ""
        rest = self._rest
        if not rest:
            return False
        if rest.startswith((FUNCTION_END, CALL_END)):
            self._rest = rest.removeprefix(FUNCTION_END)
            last = self._rest.lstrip(SPACES)
            if last.startswith(CALL_END):  # it came within a value
                self._rest = last.removeprefix(CALL_END)
            self._finish(out)
        elif rest.startswith(FUNCTION):  # another call, without this one's last tag
            self._finish(out)
            self.state, self._expects = "open", "head"
        elif rest.startswith(PARAMETER):
            found = _NAME.match(rest, len(PARAMETER))
            assert found is not None
            if found.end() == len(rest) and len(found[0]) <= MOST_NAME:
                return False
            if not rest.startswith(">", found.end()):
                self._rest = rest[1:]
                return True
            self._open(found[0].strip(_AROUND_NAMES))
            self._rest = rest[found.end() + 1 :]
        elif any(tag.startswith(rest) for tag in (FUNCTION_END, FUNCTION, PARAMETER)):
            return False
        else:
            self._rest = rest[1:]
        return True

    def _open(self, key: str) -> None:
        self._key, self._expects = key, "line"
        self._allowed = self._kinds.get(key) or self._kinds.get("", TEXT)
        self._way = ""
        self._json = Value()
        self._word = ""
        self._words.clear()

    def _line(self, out: list[Part]) -> bool:
        """Take in the line break before a value."""
        if not self._rest:
            return False
        self._rest = self._rest.removeprefix("\n")
        self._expects = "value"
        return True

    def _value(self, out: list[Part]) -> bool:
        """Read the value up to its end, or up to what may be its end."""
        rest, at = self._rest, 0
        for found in _END.finditer(rest):
            self._write(rest[at : found.start()], out)
            at = found.start()
            if self._ends(found):
                self._rest = rest[found.end() :]
                self._end_value(out)
                return True
        held = _beginning().search(rest, max(at, len(rest) - _LONGEST))
        self._write(rest[at : held.start() if held else None], out)
        self._rest = held[0] if held else ""
        return False

    def _ends(self, found: re.Match[str]) -> bool:
        """Return True if a match ends the value, False if it is a part of its text."""
        if found[1] is not None and (found[1] not in self._kinds or found[1] in self._given | {self._key}):
            return False  # a tag of an argument that may not come
        # A string of JSON has no line break.
        return found[0].startswith("\n") or self._way != "json" or not self._json.quoted

    def _write(self, text: str, out: list[Part]) -> None:
        """Write more of the value, as soon as it is known how."""
        if not self._way:
            text, self._word = self._word + text, ""
            self._way = self._way_of(text)
            if self._way in ("string", "json"):
                self._name(out)
                self._argued('"' if self._way == "string" else "", out)
            elif not self._way:
                self._word = text
        if self._way == "string":
            self._argued(inner(text), out)
        elif self._way == "at its end":
            self._words.append(text)
        elif self._way == "json" and text and not self._json.over:
            self._argued(self._json.push(text, 0)[1], out)

    def _way_of(self, text: str) -> Way:
        """Return how a value is written that begins with this text; "" if more of it must come first."""
        others = self._allowed - TEXT
        if others == self._allowed:
            first = text.lstrip(SPACES)[:1]
            return "" if not first else "json" if first in "{[" else "at its end"
        if not others <= {"boolean", "null"}:
            return "at its end"
        words = (word for word, (kind, _) in CONSTANTS.items() if kind in others)
        return "" if any(word.startswith(text) for word in words) else "string"

    def _name(self, out: list[Part]) -> None:
        """Write the name of an argument before its value."""
        self._argued(f"{', ' if self._given else '{'}{quoted(self._key)}: ", out)
        self._given.add(self._key)

    def _end_value(self, out: list[Part]) -> None:
        if self._way == "string":
            self._argued('"', out)
        elif self._way == "json":
            self._argued(self._json.end(), out)
        else:
            self._name(out)
            self._argued(read_value(self._word + "".join(self._words), self._allowed), out)
        self._expects = "tag"

    def _finish(self, out: list[Part]) -> None:
        self._argued("}" if self._given else "{}", out)
        self._ended(out)

    def end(self, out: list[Part]) -> None:
        if self._expects == "head":
            self.state = "failed"
            return
        if self.quoted:
            tag = self._rest.startswith("\n") or PARAMETER_END in self._rest or FUNCTION_END in self._rest
            self._write("" if tag else self._rest, out)
            self._end_value(out)
        self._finish(out)
