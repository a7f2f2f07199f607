"""Patterns of JSON schemas: JavaScript's regular expressions, translated to Rust's, which llguidance reads."""

from __future__ import annotations

import json
import re
from functools import lru_cache

_LETTERS = frozenset("dDwWsSnrtvf")  # letters with a meaning behind a backslash, but for those that are translated
_UNREAD = re.compile("regex parse error|lookarounds")  # in llguidance's errors
_QUANTIFIER = re.compile(r"\{\d+(,\d*)?\}")
_LOOK = re.compile(r"\(\?(?:[=!]|<[=!])")
_HEX = re.compile(r"u(?:\{[0-9a-fA-F]+\}|[0-9a-fA-F]{4})|x[0-9a-fA-F]{2}")
_PAIR = re.compile(r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"\\[pP]\{[\w=]+\}")
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # escapes, classes and other characters
_CLASS_ESCAPE = re.compile(r"\\[dDwWsS]|\\[pP]\{[^}]*\}")


@lru_cache(maxsize=256)
def translated(pattern: str) -> str | None:
    """Return a pattern in llguidance's syntax, equal if it is so already; None if it has no equivalent there.

    These have none: look-around, word boundaries, back-references, and anchors in the middle.
    """
    written = _Translation(pattern).whole()
    if written is not None and _has_inner_anchor(written) and not is_read(written):
        return None
    return written


def _has_inner_anchor(pattern: str) -> bool:
    inner = pattern.removeprefix("^").removesuffix("$")
    return "^" in inner or "$" in inner


@lru_cache(maxsize=256)
def is_read(pattern: str) -> bool:
    """Return True if llguidance reads a pattern in its syntax."""
    from llguidance import LLMatcher

    grammar = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": pattern}}]})
    return not _UNREAD.search(LLMatcher.validate_grammar(grammar))


def alternatives(pattern: str) -> list[str]:
    """Return a pattern's alternatives, those outside of all its groups."""
    found, depth = [""], 0
    for part in _PARTS.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append("")
        else:
            found[-1] += part
    return found


class _Translation:
    """The translation of one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at, self._out = pattern, 0, list[str]()

    def whole(self) -> str | None:
        """Return the pattern in Rust's syntax; None if it has no equivalent."""
        pattern = self._pattern
        while self._at < len(pattern):
            char = pattern[self._at]
            if char == "\\":
                if not self._escape(in_class=False):
                    return None
            elif char == "[":
                if not self._class():
                    return None
            elif _LOOK.match(pattern, self._at):
                return None
            elif char == "{":
                quantifier = _QUANTIFIER.match(pattern, self._at)
                self._take(quantifier[0] if quantifier and self._out else "{", "" if quantifier else "\\")
            else:
                self._take(char)
        return "".join(self._out)

    def _take(self, text: str, before: str = "") -> None:
        """Copy a text of the pattern, after `before`."""
        self._out.append(before + text)
        self._at += len(text)

    def _replace(self, length: int, text: str) -> bool:
        self._out.append(text)
        self._at += length
        return True

    def _escape(self, *, in_class: bool) -> bool:
        """Translate an escape. Return False if it has no equivalent."""
        pattern, at = self._pattern, self._at
        char = pattern[at + 1 : at + 2]
        if char.isdecimal() and char != "0":
            return False  # a back-reference
        if char in ("b", "B", "k") and not in_class:
            return False  # a word boundary, or a back-reference by name
        if char == "b":
            return self._replace(2, r"\x08")
        if char == "0":
            return self._replace(2, r"\x00")
        if char == "c" and pattern[at + 2 : at + 3].isalpha() and pattern[at + 2].isascii():
            return self._replace(3, f"\\x{ord(pattern[at + 2].upper()) - 64:02x}")
        if pair := _PAIR.match(pattern, at + 1):
            high, low = int(pair[1], 16), int(pair[2], 16)
            return self._replace(12, f"\\u{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:X}}}")
        if char in ("u", "x"):
            if not (found := _HEX.match(pattern, at + 1)):
                return self._replace(2, char)
            if not in_unicode(int(found[0][1:].strip("{}"), 16)):
                return False
            self._take("\\" + found[0])
            return True
        if char in ("p", "P"):  # a property of Unicode, or else the letter
            found = _PROPERTY.match(pattern, at)
            self._take(found[0]) if found else self._replace(2, char)
            return True
        if (char.isalnum() and char not in _LETTERS) or char in ("<", ">"):
            return self._replace(2, char)  # JavaScript reads it as the character itself
        self._take(pattern[at : at + 2])
        return True

    def _class(self) -> bool:
        """Translate a class of characters. Return False if it has no equivalent."""
        pattern, start = self._pattern, self._at
        negated = pattern.startswith("[^", start)
        if pattern.startswith("]", start + 1 + negated):  # an empty class, which Rust does not have
            return self._replace(2 + negated, r"[\s\S]" if negated else r"[^\s\S]")
        self._take("[^" if negated else "[")
        while self._at < len(pattern) and (char := pattern[self._at]) != "]":
            before = pattern[self._at - 1]
            if char == "\\":
                if not self._escape(in_class=True):
                    return False
            elif char == "[" or (char in "&~" and before == char):
                self._take(char, "\\")
            elif pattern.startswith("--", self._at) and self._at == start + 1 + negated:
                self._replace(2, r"\--")  # a range that begins with a hyphen
            elif char == "-" and self._out[-1] == "-":
                self._take(char, "\\")  # a range that ends with one; Rust reads -- as a difference
            elif char == "-" and (_CLASS_ESCAPE.match(pattern, self._at + 1) and self._at > start + 1 + negated):
                self._take(char, "\\")  # no range: a class of characters follows
            else:
                self._take(char)
        if self._at < len(pattern):
            self._take("]")
        return True


def in_unicode(code: int) -> bool:
    """Return True if a code point is a character, and no half of a pair."""
    return code < 0xD800 or 0xDFFF < code <= 0x10FFFF
