"""The rules of a tokenizer.json: a token's bytes, places where a text can be cut, and control tokens in texts.

Decoder: two families are supported, byte-level vocabularies (GPT-2's table of printable stand-ins for bytes) and
SentencePiece ones ("▁" for a space, `<0xE2>` for a byte). With a rule per token, text is streamed without looking
back.

Cuts: the parts of a text have the same tokens as the whole. Most tokenizers first split a text by patterns that match
one run of letters, digits, spaces or signs at a time. All of them split between a letter or digit and a sign or space,
whatever stands before and after. The match that ends with the letter also ends there if the text does, and the next
match does not depend on it. A tokenizer's patterns are parsed to find out if it does so; nothing is assumed of other
tokenizers.

Control tokens: they are found where a template wrote them, and made inert in messages. They are added tokens that are
marked special (turn marks, BOS, …). They are found as the library finds them. So the other added tokens count too: an
added token "<s><tool>" hides the control token "<s>".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ssmd.text.patterns import alternatives

Step = Callable[[str], str]
MOST_GROWTH = 64  # factor by which all replacements together may lengthen a token
MAX_STEPS = 32  # steps of a decoder, each applied to every token; decoders in use have 6


class DecoderError(ValueError):
    """A decoder that cannot be read as one rule per token."""


def _byte_table() -> dict[str, int]:
    """Return the inverse of GPT-2's `bytes_to_unicode`: printable Latin-1 is itself, U+0100 on the other bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_table()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass
class Decoding:
    """A tokenizer's rule from a token to bytes. `separator`, `first_drops` and `strip` depend on the position."""

    steps: list[Step] = field(default_factory=list)  # on the token's text, in order
    byte_level: bool = False
    byte_fallback: bool = False
    separator: bytes = b""  # before every token but the first
    first_drops: str = ""  # this character is left out of the first token
    strip: tuple[str, int] = ("", 0)  # (character, how many of it are left out at the beginning of the whole text)

    def of(self, token: str) -> bytes:
        """Return the bytes of a token, given as in the vocabulary, at any position but the first."""
        if self.byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(found[1], 16)])
        for step in self.steps:
            token = step(token)
        if self.byte_level:
            try:
                return bytes([BYTE_OF[char] for char in token])
            except KeyError:  # an added token, in plain text
                return token.encode()
        return token.encode()


def read_decoder(state: bytes | None) -> Decoding:
    """Read the decoder's JSON of a tokenizer.json; None if it has no decoder.

    Raises DecoderError, which names the part that is not supported.
    """
    decoding = Decoding()
    if state is None:
        decoding.separator = b" "
        return decoding
    spec: dict[str, Any] = json.loads(state)
    fused, growth = False, 1
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    if len(parts) > MAX_STEPS:
        raise DecoderError(f"a decoder of {len(parts)} steps, at most {MAX_STEPS} are allowed")
    for part in parts:
        kind = part["type"]
        after_bytes = decoding.byte_level or decoding.byte_fallback
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not part["stop"] and not decoding.strip[1]:
            decoding.strip = (part["content"], int(part["start"]))
        elif fused or after_bytes:
            raise DecoderError(f"decoder {kind!r} in a place where only 'Fuse' and a left 'Strip' are understood")
        elif kind == "ByteLevel":
            decoding.byte_level = True
        elif kind == "ByteFallback":
            decoding.byte_fallback = True
        elif kind == "Replace" and "String" in part["pattern"]:
            growth *= max(1, len(part["content"]))
            if growth > MOST_GROWTH:
                raise DecoderError(f"a decoder that makes tokens more than {MOST_GROWTH} times as long")
            decoding.steps.append(_replace(part["pattern"]["String"], part["content"]))
        elif kind == "Metaspace":
            decoding.steps.append(_replace(part["replacement"], " "))
            if part.get("prepend_scheme", "always") != "never":
                decoding.first_drops = part["replacement"]
        else:
            raise DecoderError(f"decoder {kind!r} is not understood")
    return decoding


def _replace(old: str, new: str) -> Step:
    return lambda token: token.replace(old, new)


PIECE = 1 << 15  # characters encoded at once, and a few more up to the next possible cut
# Letters and digits in every version of Unicode that never compose with a following sign or space.
_WORDS = (
    "0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f\u0391-\u03a1\u03a3-\u03c9\u0400-\u045f\u05d0-\u05ea\u0621-\u063a"
    "\u0641-\u064a\u0905-\u0939\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
_SIGNS = r" \n\t.,;:!?\"，。、！？；：（"
# All bytes of these in UTF-8, and more. Vocabularies lack some bytes that texts seldom have, or never.
BYTES_AT_PLACES = frozenset(b"\t\n" + bytes([*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF0)]))
# Alternatives that a pattern may have: none of them matches a letter or a digit and then a sign or space.
_OF_LETTERS = frozenset((r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+"))
_OF_DIGITS = frozenset((r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}"))
_OF_SIGNS = frozenset((r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"))
_SPACES = r"\s+"
_OTHERS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)")
_ALTERNATIVES = _OF_LETTERS | _OF_DIGITS | _OF_SIGNS | {_SPACES, r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]", *_OTHERS}


def places(library: tokenizers.Tokenizer, added: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """Return a pattern whose matches end where a text may be cut, never inside an added token; None if unknown."""
    normalizer, splitter = (_state(part) for part in (library.normalizer, library.pre_tokenizer))
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    steps = [] if splitter is None else splitter.get("pretokenizers", [splitter])
    if not all(_is_known(step) for step in steps) or not any(_separates(step) for step in steps):
        return None
    signs = " " if any(step.get("add_prefix_space") for step in steps) else _SIGNS
    digits = "|[0-9](?=[0-9])" if any(_splits_digits(step) for step in steps) and signs == _SIGNS else ""
    place = re.compile(f"[{_WORDS}](?=[{signs}]){digits}")
    for token in added:
        text = str(token.content)
        if token.single_word or place.search(text) or (token.rstrip and re.search(f"[{_WORDS}]\\Z", text)):
            return None
    return place


def pieces(text: str, place: re.Pattern[str] | None) -> Iterator[str]:
    """Yield a text in pieces of about `PIECE` characters. They are longer where the text cannot be cut."""
    at = 0
    while place is not None and len(text) - at > PIECE:
        found = None
        look = at + PIECE
        while found is None and look < len(text):  # not all at once: other threads wait during a search
            found = place.search(text, look, min(len(text), look + PIECE + 1))
            look += PIECE
        if found is None or found.end() >= len(text):
            break
        yield text[at : found.end()]
        at = found.end()
    yield text[at:]


def count_parts(text: str, place: re.Pattern[str], enough: int) -> int:
    """Count the parts into which a text may be cut, until there are more than `enough`."""
    count = 0
    for at in range(0, len(text), PIECE):  # not all at once: other threads wait during a search
        count += len(place.findall(text, at, min(len(text), at + PIECE + 1)))
        if count >= enough:
            break
    return count + bool(text)


def each_part_counts(library: tokenizers.Tokenizer) -> bool:
    """Return True if each part of a text surely has a token: the text is split into bytes that have tokens."""
    splitter = _state(library.pre_tokenizer) or {}
    steps = splitter.get("pretokenizers", [splitter])
    letters = (letter for letter, byte in BYTE_OF.items() if byte in BYTES_AT_PLACES)
    return any(step.get("type") == "ByteLevel" for step in steps) and all(
        library.model.token_to_id(letter) is not None for letter in letters
    )


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else dict(json.loads(part.__getstate__()))


def _is_known(step: dict[str, Any]) -> bool:
    found = _alternatives(step)
    return step.get("type") in ("ByteLevel", "Digits") or (bool(found) and _ALTERNATIVES.issuperset(found))


def _separates(step: dict[str, Any]) -> bool:
    """Return True if the step splits letters, digits, signs and spaces from one another.

    Its pattern must match every character: the text between two matches stays one part, whatever it consists of.
    """
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex"))
    found = set(_alternatives(step))
    return all(not found.isdisjoint(kind) for kind in (_OF_LETTERS, _OF_DIGITS, _OF_SIGNS, (_SPACES,)))


def _splits_digits(step: dict[str, Any]) -> bool:
    """Return True if the step makes every digit a part of its own."""
    alone = {r"\p{N}"} == _OF_DIGITS.intersection(_alternatives(step))
    return alone or (step.get("type") == "Digits" and bool(step.get("individual_digits")))


def _alternatives(step: dict[str, Any]) -> list[str]:
    """Return the top-level alternatives of a step's pattern; [] unless the step isolates every match of a pattern."""
    if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
        return []
    return alternatives(step.get("pattern", {}).get("Regex", ""))


def matches(
    pattern: re.Pattern[str], text: str, start: int, stop: int, longest: int, piece: int = PIECE
) -> Iterator[re.Match[str]]:
    """Yield a pattern's matches in text[start:stop].

    The text is searched a piece at a time, as other threads wait during a search. longest: most characters of a match.
    """
    at = start
    while at < stop:
        end = min(stop, at + piece)
        found = pattern.search(text, at, min(stop, end + longest))
        if found is None or found.start() >= end:
            at = end
            continue
        yield found
        at = found.end()


# Supplementary Private Use Area-B: one character per control token, one that quotes, one that frames marks in texts
# for the library.
FIRST_SENTINEL = 0x100000
MAX_CONTROLS = 0xFF00
MAX_BRANCHES = 100  # added tokens that begin alike, one inside the next; runs of up to 30 spaces or lines are in use
MAX_ADDED = 256 << 10  # characters of all added tokens together; tokenizers in use have up to 80,000
_SEARCHED = 1 << 26  # characters compared in one search: about 50 ms, during which other threads wait
QUOTE = chr(0x10FFF0)
FRAME = chr(0x10FFF1)
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
_SPACES_AFTER = re.compile(f"[{_WHITE_SPACE}]*")
_EACH_SPACE = "".join(re.findall(f"[{_WHITE_SPACE}]", "".join(map(chr, range(0x3001)))))


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
