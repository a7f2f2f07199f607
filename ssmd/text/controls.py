"""Control tokens in texts: found where a template wrote them, and made inert in messages.

Control tokens are added tokens that are marked special (turn marks, BOS, …). They are found as the library finds them.
So the other added tokens count too: an added token "<s><tool>" hides the control token "<s>".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby, takewhile

from tokenizers import AddedToken

from ssmd.text.cutting import PIECE, matches

# Supplementary Private Use Area-B: one character per control token, one that quotes, one that frames marks in texts
# for the library.
FIRST_SENTINEL = 0x100000
MAX_CONTROLS = 0xFF00
MAX_BRANCHES = 100  # added tokens that begin alike, one inside the next; runs of up to 30 spaces or lines are in use
MAX_ADDED = 256 << 10  # characters of all added tokens together; tokenizers in use have up to 80,000
_SEARCHED = 1 << 26  # characters compared in one search: about 50 ms, during which other threads wait
QUOTE = chr(0x10FFF0)
FRAME = chr(0x10FFF1)
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
_SPACES_AFTER = re.compile(f"[{_SPACES}]*")
_EACH_SPACE = "".join(re.findall(f"[{_SPACES}]", "".join(map(chr, range(0x3001)))))


class ControlsError(ValueError):
    """Added tokens that are too many, too long or too alike to be searched for in a text."""


class Controls:
    """A tokenizer's control tokens. special: the text of each, by id. added: all added tokens, by id. Thread-safe."""

    def __init__(self, added: Mapping[int, AddedToken], stop_tokens: Collection[int], *, normalizes: bool) -> None:
        """stop_tokens: control tokens even if `added` does not mark them special. Raises ControlsError.

        normalizes: the library searches normalised text for the added tokens marked `normalized`.
        """
        self.added = added
        self.special = {token: str(a.content) for token, a in added.items() if a.special or token in stop_tokens}
        if len(self.special) > MAX_CONTROLS or any(_is_reserved(c) for text in self.special.values() for c in text):
            raise ControlsError("the tokenizer has too many special tokens, or some with private-use characters")
        self._by_text = {str(a.content): (token, a) for token, a in added.items()}
        spelt = sum(len(text) for text in self._by_text)
        if spelt > MAX_ADDED:
            raise ControlsError(f"the added tokens have {spelt} characters, at most {MAX_ADDED} are allowed")
        self._normalizes = normalizes
        self._sentinel_of = {text: chr(FIRST_SENTINEL + i) for i, text in enumerate(sorted(self.special.values()))}
        self._text_of = {sentinel: text for text, sentinel in self._sentinel_of.items()}
        reserved = f"[{chr(FIRST_SENTINEL)}-{chr(FIRST_SENTINEL + MAX_CONTROLS)}{QUOTE}{FRAME}]"
        self._reserved = re.compile(reserved)
        self._to_escape = re.compile("|".join([reserved, *_longest(sorted(set(self.special.values())))]))
        self._to_unescape = re.compile(f"{QUOTE}(.?)|{reserved}", re.DOTALL)
        self._passes = [
            _any_of(text for a in added.values() if (text := str(a.content)) and bool(a.normalized) is normalized)
            for normalized in (False, True)
        ]
        self._piece = min(PIECE, _SEARCHED // max(1, spelt))  # each position may be compared with all of them
        self._longest = max((len(text) for text in (*self._by_text, QUOTE + " ")), default=0)

    def escape(self, content: str) -> str:
        """Replace control tokens' text in a message by one private-use character each. `unescape` undoes it."""
        return self._replaced(self._to_escape, content, lambda m: self._sentinel_of.get(m[0]) or QUOTE + m[0])

    def unescape(self, text: str) -> str:
        """Turn an escaped text into the plain one again; `unescape(escape(text)) == text`."""
        return self._replaced(
            self._to_unescape, text, lambda m: m[1] if m[1] is not None else self._text_of.get(m[0], m[0])
        )

    def quote(self, text: str) -> str:
        """Quote characters of the text that `escape` uses itself. `parts` undoes it."""
        return self._reserved.sub(lambda m: QUOTE + m[0], text)

    def _replaced(self, pattern: re.Pattern[str], text: str, by: Callable[[re.Match[str]], str]) -> str:
        parts, at = [], 0
        for found in matches(pattern, text, 0, len(text), self._longest, self._piece):
            parts += [text[at : found.start()], by(found)]
            at = found.end()
        return "".join([*parts, text[at:]]) if parts else text

    def parts(self, rendered: str) -> Iterator[str | int]:
        """Yield a rendered text's plain texts and control tokens in turn, first and last a text, perhaps empty."""
        at = 0
        for start, end, token in self._control_matches(rendered):
            yield self.unescape(rendered[at:start])
            yield token
            at = end
        yield self.unescape(rendered[at:])

    def cuts(self, rendered: str, limit: int, *, behind: bool) -> Iterator[int]:
        """Yield positions up to `limit` for a cut: starts of control tokens, and their ends if `behind`."""
        floor = 0
        for start, end, token in self._control_matches(rendered):
            a = self.added[token]
            before = start - floor - len(rendered[floor:start].rstrip(_EACH_SPACE)) if a.lstrip else 0
            after = _SPACES_AFTER.match(rendered, end) if a.rstrip else None
            first, floor = start - before, after.end() if after else end
            if first > limit:
                return
            # single_word looks at its neighbours, and a normalized token is found only after normalisation.
            if a.single_word or (a.normalized and self._normalizes):
                continue
            if not self._within_a_word(rendered, first):
                yield first
            if behind and floor <= limit and not self._within_a_word(rendered, floor):
                yield floor

    def _within_a_word(self, rendered: str, at: int) -> bool:
        """Return True if a single-word token could match beside a cut here but not in the whole text.

        In `<|end|>xBOS`, for example, `BOS` matches only if the text is cut before it.
        """
        inside = 0 < at < len(rendered) and _is_word(rendered[at - 1]) and _is_word(rendered[at])
        return inside and any(a.single_word for a in self.added.values())

    def _control_matches(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, token) of the control tokens in order, found as the library finds them.

        The leftmost match wins, then the longest: first among added tokens matched on raw text, then among the others.
        """
        raw, normalized = self._passes
        at = 0
        for start, end, token in self._matches(raw, text, 0, len(text)):
            yield from self._special_matches(normalized, text, at, start)
            if token in self.special:
                yield start, end, token
            at = end
        yield from self._special_matches(normalized, text, at, len(text))

    def _special_matches(
        self, pattern: re.Pattern[str] | None, text: str, start: int, stop: int
    ) -> Iterator[tuple[int, int, int]]:
        return (m for m in self._matches(pattern, text, start, stop) if m[2] in self.special)

    def _matches(
        self, pattern: re.Pattern[str] | None, text: str, start: int, stop: int
    ) -> Iterator[tuple[int, int, int]]:
        if pattern is None:
            return
        for found in matches(pattern, text, start, stop, self._longest, self._piece):
            token, added = self._by_text[found[0]]
            first, last = found.span()
            if added.single_word and (
                (first > start and _is_word(text[first - 1])) or (last < stop and _is_word(text[last]))
            ):
                continue
            yield first, last, token


def _any_of(texts: Iterator[str]) -> re.Pattern[str] | None:
    ordered = sorted(set(texts))
    return re.compile("|".join(_longest(ordered))) if ordered else None


def _longest(texts: list[str], depth: int = 0) -> Iterator[str]:
    """Yield expressions of which at most one matches at a position: the longest of these sorted texts there.

    A common prefix is compared only once. Otherwise 700 tokens of a's and a Z would take seconds in a text of a's.
    """
    if depth > MAX_BRANCHES:
        raise ControlsError(f"more than {MAX_BRANCHES} added tokens begin alike, one within the other")
    for _, same in groupby(texts, key=lambda text: text[:1]):
        alike = list(same)
        same_so_far = takewhile(lambda pair: pair[0] == pair[1], zip(alike[0], alike[-1], strict=False))
        common = "".join(char for char, _ in same_so_far)
        if not common or len(alike) == 1:
            if common:
                yield re.escape(common)
            continue
        after = [text[len(common) :] for text in alike]
        others = [*_longest(after, depth + 1), *([""] if not after[0] else [])]
        yield f"{re.escape(common)}(?:{'|'.join(others)})"


def _is_word(char: str) -> bool:
    return re.match(r"\w", char) is not None


def _is_reserved(char: str) -> bool:
    return FIRST_SENTINEL <= ord(char) <= ord(FRAME)
