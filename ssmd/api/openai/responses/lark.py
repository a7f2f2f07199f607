"""A grammar in Lark as one regular expression, for a custom tool's text: it stands inside JSON, where no grammar can.

Only grammars without recursion have one. Lark's syntax: https://lark-parser.readthedocs.io/en/stable/grammar.html
"""

from __future__ import annotations

import json
import re

from ssmd.api.openai.fields import MAX_REGEX_CHARS

MAX_DEPTH = 64  # groups and rules within each other
MAX_GRAMMAR_CHARS = 2 * MAX_REGEX_CHARS  # with names, spaces and comments
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r]+ | (?://|\#)[^\n]*)
    | (?P<line>\n[\s]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*")(?P<flag>i?)
    | (?P<regex>/(?:[^/\\\n]|\\.)+/)(?P<flags>[a-z]*)
    | (?P<name>[?!]?[_A-Za-z][_A-Za-z0-9]*)(?P<rank>\.\d+)?
    | (?P<alias>->[ \t]*[_a-z][_a-z0-9]*)
    | (?P<directive>%[^\n]*)
    | (?P<sign>[:|()\[\]?*+])
    """,
    re.VERBOSE,
)
_IMPORT = re.compile(r"%import\s+common\.([A-Z_]+)\s*(?:->\s*([A-Z_]+))?\s*")
_COMMON = {
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$/])")


class NoRegex(Exception):
    """A grammar that is recursive, too long, or of syntax that is not read here."""


def regex_of(grammar: str) -> str:
    """Return a regular expression for the texts of a grammar. Raises NoRegex."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise NoRegex("it is too long")
    rules = _rules(_tokens(grammar))
    if "start" not in rules:
        raise NoRegex("there is no rule start")
    return _Expansion(rules).rule("start")


def _tokens(grammar: str) -> list[tuple[str, str]]:
    """Return (kind, value) of each token. Texts and patterns are regular expressions already."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None or match["flags"]:
            raise NoRegex(f"unread at character {at}")
        at, kind = match.end(), match.lastgroup or ""
        if match["text"] is not None:
            try:
                text = json.loads(match["text"])
                text.encode()  # half of a surrogate pair is no text
            except ValueError:
                raise NoRegex(f"unread text before character {at}") from None
            plain = "".join(_either_case(char) if match["flag"] else _quoted(char) for char in text)
            found.append(("atom", plain))
        elif match["regex"] is not None:
            inner = match["regex"][1:-1].replace("\\/", "/")
            found.append(("atom", f"(?:{inner})"))
        elif match["name"] is not None:
            found.append(("name", match["name"].lstrip("?!")))
        elif kind not in ("space", "alias"):
            found.append((kind, match[0]))
    return found


def _quoted(char: str) -> str:
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(char) or _SPECIAL.sub(r"\\\1", char)


def _either_case(char: str) -> str:
    lower, upper = char.lower(), char.upper()
    return _quoted(char) if lower == upper or len(lower + upper) != 2 else f"[{lower}{upper}]"


def _rules(tokens: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Return the tokens of each rule's right side, by its name."""
    rules: dict[str, list[tuple[str, str]]] = {}
    body: list[tuple[str, str]] | None = None
    for i, (kind, value) in enumerate(tokens):
        following = tokens[i + 1] if i + 1 < len(tokens) else ("", "")
        if kind == "directive":
            found = _IMPORT.fullmatch(value)
            if found is None or found[1] not in _COMMON:
                raise NoRegex(f"{value.split()[0]} is not read")
            rules[found[2] or found[1]] = [("atom", _COMMON[found[1]])]
        elif kind == "name" and following == ("sign", ":"):
            body = rules.setdefault(value, [])
        elif kind == "line" or (kind, value) == ("sign", ":"):
            continue
        elif body is None:
            raise NoRegex("a rule has no name")
        else:
            body.append((kind, value))
    return rules


class _Expansion:
    """Puts rules in place of their names."""

    def __init__(self, rules: dict[str, list[tuple[str, str]]]) -> None:
        self._rules = rules
        self._under_way: set[str] = set()
        self._done: dict[str, str] = {}
        self._depth = 0

    def rule(self, name: str) -> str:
        if name in self._done:
            return self._done[name]
        if name in self._under_way or name not in self._rules:
            raise NoRegex(f"{name} refers to itself, or is unknown")
        self._under_way.add(name)
        tokens = self._rules[name]
        found, at = self._choice(tokens, 0)
        if at != len(tokens) or len(found) > MAX_REGEX_CHARS:
            raise NoRegex(f"{name} is not read whole, or too long")
        self._under_way.discard(name)
        self._done[name] = found
        return found

    def _choice(self, tokens: list[tuple[str, str]], at: int) -> tuple[str, int]:
        """Return (regular expression, index after it) of alternatives."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoRegex("it is nested too deeply")
        options, parts, chars = [], list[str](), 0
        while at < len(tokens) and tokens[at] not in (("sign", ")"), ("sign", "]")):
            kind, value = tokens[at]
            at += 1
            if (kind, value) == ("sign", "|"):
                options.append("".join(parts))
                parts, chars = [], chars + 1
                continue
            if kind == "atom":
                part = f"(?:{value})" if len(value) > 1 else value
            elif kind == "name":
                part = f"(?:{self.rule(value)})"
            elif value in ("(", "["):
                inner, at = self._choice(tokens, at)
                if at == len(tokens) or tokens[at][1] != {"(": ")", "[": "]"}[value]:
                    raise NoRegex("a group has no end")
                part, at = f"(?:{inner}){'?' if value == '[' else ''}", at + 1
            else:
                raise NoRegex(f"{value} is not read")
            if at < len(tokens) and tokens[at][0] == "sign" and tokens[at][1] in "?*+":
                part, at = f"(?:{part}){tokens[at][1]}", at + 1
            parts.append(part)
            chars += len(part)
            if chars > MAX_REGEX_CHARS:
                raise NoRegex("it is too long")
        self._depth -= 1
        return "|".join([*options, "".join(parts)]), at
