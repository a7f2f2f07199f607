"""The parser of a value as models write it, in JSON or in Python. It writes JSON, piece by piece.

It reads every text and never fails. JSON comes out byte by byte as it is. Anything else is repaired as it comes: a
piece that was sent cannot be taken back. At any point `end` completes the JSON that was written so far.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ssmd.text.calls.scalar import inner, scalar

SPACES = " \t\r\n"
MAX_DEPTH = 64  # levels of nesting; a value below them is written as a string of its JSON, which every parser reads
_SPACES = re.compile(r"[ \t\r\n]+")
_PLAIN = {quote: re.compile(rf'[^"\\{quote}\x00-\x1f\ud800-\udfff]+') for quote in "\"'"}
_KEY = re.compile(r"[^\s,:={}\[\]()\"']+")
_WORD = re.compile(r"[^\s,{}\[\]()\"']+")
_TO_PAREN = re.compile(r"[^()]+")
_ESCAPES = {**{char: f"\\{char}" for char in '"\\/bfnrt'}, "'": "'"}
_HEX = {"x": 2, "u": 4, "U": 8}
_PREFIXES = "fFrRbBuU"  # letters before a string of Python; an f-string is taken as its text


class _Level(NamedTuple):
    """An open bracket. closer: the bracket that closes it. written: its JSON; "" for a bracket too many."""

    closer: str
    written: str
    holds_keys: bool


_LEVELS = {"{": _Level("}", "}", True), "[": _Level("]", "]", False), "(": _Level(")", "]", False)}
_EXTRA = {char: _Level(level.closer, "", True) for char, level in _LEVELS.items()}


class Value:
    """The parser of one value.

    python: a value of Python, written with the spaces of json.dumps; else the spaces stay as they are.
    key: a key, which ends before its colon. first: its first character. over: it has ended.
    """

    def __init__(self, *, python: bool = False, key: bool = False) -> None:
        self.first = ""
        self.over = False
        self._python = python
        self._out: list[str] = []
        self._levels: list[_Level] = []
        self._open = {"}": 0, "]": 0, ")": 0}
        self._depth = 0  # of what is written
        self._deep = 0  # the number of levels outside a value that is written as a string, or 0
        self._expects = "key" if key else "item"  # or ":", "value" (after a colon), "more"
        self._pending = ""  # a comma and the spaces after it: they are written if another value follows
        self._step = self._between
        self._quote, self._quotes = "", 0  # of the string; quotes in a row
        self._plain: re.Pattern[str] | None = None  # text of the string that needs no thought, if any does not now
        self._triple = self._raw = False
        self._unescaped = False  # a quote came in the string that is its text
        self._escape = ""  # an unfinished escape
        self._high = ""  # the escape of a surrogate pair's first half
        self._gap: list[str] = []  # spaces after a word, or after a quote that may end its string
        self._gap_breaks = False  # the gap has a line break
        self._prefix = ""  # letters after that gap: another string of Python may follow
        self._run: list[str] = []  # a number, or words without quotes
        self._run_length = self._parens = 0
        self._star = False  # the last character of a comment was a star

    @property
    def blank(self) -> bool:
        """True if there is no value."""
        return self._expects == "item" and not self._levels

    @property
    def quoted(self) -> bool:
        """True if the next character belongs to a string."""
        step = self._step
        return step in (self._string, self._escaped) or (step == self._opening and self._quotes == 1)

    def push(self, text: str, at: int) -> tuple[int, str]:
        """Take in the text from `at` on. Return (where the value or the text ends, the JSON of that part).

        A number or a word ends before the next delimiter, a string before the next character that is not a space.
        """
        if not self.first:
            self.first = text[at : at + 1]
        if self._plain is not None:
            found = self._plain.match(text, at)
            if found is not None and found.end() == len(text):
                return len(text), found[0]
        while at < len(text) and not self.over:
            at = self._step(text, at)
        return at, self._taken()

    def end(self) -> str:
        """End the value where the text ends. Return the JSON that completes it."""
        if self._step == self._escaped:
            self._put("\\\\" + self._escape[1:] if self._escape != "\\" else "\\\\")
        if self._step in (self._string, self._escaped, self._opening, self._behind):
            self._flush_high()
            self._end_string()
        elif self._step == self._word:
            self._end_run()
        while self._levels:
            self._close_level()
        self.over = True
        return self._taken()

    def _taken(self) -> str:
        out, self._out = "".join(self._out), []
        return out

    def _put(self, text: str) -> None:
        self._out.append(inner(text) if self._deep else text)

    # Between the values

    def _between(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACES:
            found = _SPACES.match(text, at)
            assert found is not None
            self._space(found[0])
            return found.end()
        if char in "}])":
            return self._close(char, at)
        if char == ",":
            return self._comma(at)
        if char == ":" or (char == "=" and self._expects == ":"):
            self._colon()
        elif char.isspace():
            pass
        elif self._expects == "more" and not self._levels:
            self.over = True
            return at
        elif char == "#" and self._expects not in ("item", "value"):
            self._step = self._line_comment
        elif char == "/":
            self._step = self._slash
        else:
            self._follow()
            if char in "\"'":
                self._open_string(char)
            elif char in "{[(":
                self._open_level(char)
            else:
                self._step = self._word
                return at
        return at + 1

    def _space(self, text: str) -> None:
        if self._python or not self._levels:
            return
        if self._pending:
            self._pending += text
        else:
            self._put(text)

    def _comma(self, at: int) -> int:
        if not self._levels:
            self.over = True
            return at
        if self._expects in (":", "value"):
            self._put_null()
        if self._expects == "more":
            self._pending = ", " if self._python else ","
            self._expects = "key" if self._levels[-1].holds_keys else "item"
        return at + 1

    def _colon(self) -> None:
        if self._expects != ":":
            return
        if not self._levels:
            self.over = True
            return
        self._put(": " if self._python else ":")
        self._expects = "value"

    def _put_null(self) -> None:
        """Write the value of a key that has none."""
        self._put(": null" if self._expects == ":" else "null")
        self._expects = "more"

    def _follow(self) -> None:
        """Note that a value begins: write a colon if it is missing, a comma if it is missing or waits."""
        if self._expects == ":":
            self._put(": ")
            self._expects = "value"
        elif self._expects == "more":
            self._pending = ", "
            self._expects = "key" if self._levels[-1].holds_keys else "item"

    def _begin(self) -> None:
        if self._pending:
            self._put(self._pending)
            self._pending = ""

    def _ended(self) -> None:
        self._step = self._between
        self._expects = ":" if self._expects == "key" else "more"
        self.over = not self._levels

    def _open_level(self, char: str) -> None:
        level = (_EXTRA if self._expects == "key" else _LEVELS)[char]
        self._open[level.closer] += 1
        if not level.written:
            self._levels.append(level)
            return
        self._begin()
        if self._depth == MAX_DEPTH and not self._deep:
            self._put('"')
            self._deep = len(self._levels)
        self._depth += 1
        self._levels.append(level)
        self._put("{" if level.holds_keys else "[")
        self._expects = "key" if level.holds_keys else "item"

    def _close(self, char: str, at: int) -> int:
        """Close the brackets up to the one that this closes. One that closes none is ignored, or ends the value."""
        if not self._levels:
            self.over = True
            return at
        if not self._open[char]:
            if not self._python:
                return at + 1
            while self._levels:
                self._close_level()
            self.over = True
            return at
        while self._close_level() != char:
            pass
        self.over = not self._levels
        return at + 1

    def _close_level(self) -> str:
        level = self._levels.pop()
        self._open[level.closer] -= 1
        if level.holds_keys and self._expects in (":", "value"):
            self._put_null()
        if not level.written:
            return level.closer
        if not self._python:
            self._put(self._pending[1:])  # the spaces after a last comma
        self._pending = ""
        self._put(level.written)
        self._depth -= 1
        if self._deep and self._deep == len(self._levels):
            self._deep = 0
            self._put('"')
        self._expects = "more"
        return level.closer

    # Strings

    def _open_string(self, quote: str) -> None:
        self._begin()
        self._put('"')
        self._reopen(quote, raw=False)

    def _reopen(self, quote: str, *, raw: bool) -> None:
        self._quote, self._quotes, self._triple, self._raw = quote, 1, False, raw
        self._unescaped = False
        self._step = self._opening

    def _opening(self, text: str, at: int) -> int:
        """Take in the character after a string's first quote: two more quotes open a long string."""
        if text[at] == self._quote:
            self._quotes += 1
            if self._quotes < 3:
                return at + 1
            self._triple, self._quotes, self._step = True, 0, self._string
            return at + 1
        if self._quotes == 2:
            self._close_string()
        else:
            self._quotes, self._step = 0, self._string
        return at

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        self._plain = None
        if char == "\\":
            self._put_quotes()
            self._escape, self._step = char, self._escaped
            return at + 1
        self._flush_high()
        if char == self._quote:
            self._quotes += 1
            if not self._triple or self._quotes == 3:
                self._close_string()
            return at + 1
        self._put_quotes()
        plain = _PLAIN[self._quote]
        found = plain.match(text, at)
        if found is None:
            self._put(inner(char))
            return at + 1
        self._put(found[0])
        self._plain = None if self._deep else plain
        return found.end()

    def _put_quotes(self) -> None:
        """Write quotes that did not end a string."""
        if self._quotes:
            self._put(inner(self._quote) * self._quotes)
            self._quotes = 0

    def _close_string(self) -> None:
        """End a key. End another string only if the next text agrees: models forget to escape quotes."""
        if self._expects == "key":
            self._end_string()
        else:
            self._gap, self._gap_breaks, self._prefix = [], False, ""
            self._step = self._behind

    def _end_string(self) -> None:
        self._put('"')
        if self._step == self._behind and self._levels and not self._python:
            self._put("".join(self._gap))
        self._quotes = 0
        self._ended()

    def _behind(self, text: str, at: int) -> int:
        """Take in the text after a quote that may end its string."""
        char = text[at]
        if char in SPACES and not self._prefix:
            found = _SPACES.match(text, at)
            assert found is not None
            self._gap.append(found[0])
            self._gap_breaks = self._gap_breaks or "\n" in found[0]
            return found.end()
        if self._python and char in "\"'" and (self._gap or not self._unescaped):
            self._reopen(char, raw="r" in self._prefix.lower())
            return at + 1
        if self._python and self._gap and char in _PREFIXES and len(self._prefix) < 2:
            self._prefix += char
            return at + 1
        if not self._prefix and self._closes(char):
            self._end_string()
            return at
        self._quotes, self._unescaped = 1, True
        self._put_quotes()
        self._put(inner("".join(self._gap) + self._prefix))
        self._step = self._string
        return at

    def _closes(self, char: str) -> bool:
        """Return True if a quote before this character ends its string."""
        if char in ",}" or self._triple or self._gap_breaks:
            return True
        if char in "])":
            return self._python or not self._levels or self._open[char] > 0
        return char in "\"'#/" and bool(self._gap)

    # Escapes

    def _escaped(self, text: str, at: int) -> int:
        char = text[at]
        if self._escape == "\\" and not self._raw and char in _HEX:
            self._escape += char
            return at + 1
        if self._escape == "\\":
            self._flush_high()
            self._put(self._simple(char))
            self._step = self._string
            return at + 1
        kind, digits = self._escape[1], self._escape[2:]
        if char not in "0123456789abcdefABCDEF":
            self._flush_high()
            self._put("\\" + self._escape)
            self._step = self._string
            return at
        self._escape += char
        if len(digits) + 1 == _HEX[kind]:
            self._end_hex(kind, digits + char)
            self._step = self._string
        return at + 1

    def _simple(self, char: str) -> str:
        if self._raw:
            return "\\\\" + inner(char)
        if self._python and char in "/\n":
            return char.strip()
        return _ESCAPES.get(char) or "\\\\" + inner(char)

    def _end_hex(self, kind: str, digits: str) -> None:
        code, half = int(digits, 16), f"\\u{digits}"
        if kind == "u" and 0xDC00 <= code < 0xE000 and self._high:
            self._put(self._high + half)
            self._high = ""
            return
        self._flush_high()
        if kind == "u" and 0xD800 <= code < 0xDC00:
            self._high = half
        elif kind == "x":
            self._put(f"\\u{code:04x}")
        elif 0xD800 <= code < 0xE000:
            self._put("\\ufffd")
        elif kind == "u":
            self._put(half.lower() if self._python else half)
        else:
            self._put(inner(chr(code)) if code < 0x110000 else "\\\\U" + digits)

    def _flush_high(self) -> None:
        """Replace half of a surrogate pair: it is no character, and strict parsers refuse it."""
        if self._high:
            self._put("\\ufffd")
            self._high = ""

    # Numbers, and words without quotes

    def _word(self, text: str, at: int) -> int:
        char = text[at]
        if self._parens:
            return self._call(text, at)
        if char in ",}]" and self._run:
            self._end_run()
            return at
        if char in SPACES or char.isspace():
            return self._word_gap(text, at)
        if char in "\"'" and not self._gap:
            if self._run_length <= 2 and self._run and all(part in _PREFIXES for part in "".join(self._run)):
                raw = "r" in "".join(self._run).lower()
                self._clear_run()
                self._begin()
                self._put('"')
                self._reopen(char, raw=raw)
                return at + 1
            if char == "'" and self._run:
                self._add(char)
                return at + 1
        if char == "(" and self._run and not self._gap and self._expects != "key":
            self._parens = 1
            self._add(char)
            return at + 1
        if char in "#/" and self._gap:
            self._end_run()
            return at
        found = (_KEY if self._expects == "key" else _WORD).match(text, at)
        if found is None or self._gap_breaks:
            if not self._run:  # a stray character
                self._step = self._between
                return at + 1
            self._end_run()
            return at
        if self._gap:
            self._add("".join(self._gap))
            self._gap.clear()
        self._add(found[0])
        return found.end()

    def _add(self, text: str) -> None:
        self._run.append(text)
        self._run_length += len(text)

    def _word_gap(self, text: str, at: int) -> int:
        if self._run_length == 1 and self._run[0] == "#":
            self._clear_run()
            self._step = self._line_comment
            return at
        found = _SPACES.match(text, at)
        if found is None:
            return at + 1
        self._gap.append(found[0])
        self._gap_breaks = self._gap_breaks or "\n" in found[0]
        return found.end()

    def _call(self, text: str, at: int) -> int:
        """Take in what stands in round brackets after a word, as in date(2024, 1, 1): it belongs to the word."""
        found = _TO_PAREN.match(text, at)
        if found is not None:
            self._add(found[0])
            return found.end()
        self._parens += 1 if text[at] == "(" else -1
        self._add(text[at])
        return at + 1

    def _clear_run(self) -> None:
        self._run, self._gap, self._gap_breaks = [], [], False
        self._run_length = self._parens = 0

    def _end_run(self) -> None:
        written, gap = scalar("".join(self._run), key=self._expects == "key"), "".join(self._gap)
        self._clear_run()
        self._begin()
        self._put(written)
        self._ended()
        if self._levels and not self._python:
            self._put(gap)

    # Comments

    def _slash(self, text: str, at: int) -> int:
        if text[at] == "/":
            self._step = self._line_comment
        elif text[at] == "*":
            self._star, self._step = False, self._block_comment
        elif self._expects == "more" and not self._levels:
            self.over = True
        else:
            self._follow()
            self._add("/")
            self._step = self._word
            return at
        return at + 1

    def _line_comment(self, text: str, at: int) -> int:
        found = text.find("\n", at)
        if found < 0:
            return len(text)
        self._step = self._between
        return found

    def _block_comment(self, text: str, at: int) -> int:
        if self._star and text[at] == "/":
            self._step = self._between
            return at + 1
        found = text.find("*/", at)
        if found >= 0:
            self._step = self._between
            return found + 2
        self._star = text[-1] == "*"
        return len(text)


def arguments_of(written: str) -> str | None:
    """Return the arguments in a value that is not an object, from its JSON; None if it holds none.

    They may be the JSON text of an object, as a string. null, an empty list and blank text are no arguments: {}.
    """
    value: object = json.loads(written)
    text = value.strip() if isinstance(value, str) else None
    if value is None or value == [] or text == "":
        return "{}"
    if text is None or text[0] != "{":
        return None
    parser = Value()
    return parser.push(text, 0)[1] + parser.end()
