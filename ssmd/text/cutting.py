"""Cuts of a text into parts that have the same tokens as the whole.

Most tokenizers first split a text by patterns that match one run of letters, digits, spaces or signs at a time.
All of them split between a letter or digit and a sign or space, whatever stands before and after. The match that ends
with the letter also ends there if the text does, and the next match does not depend on it. A tokenizer's patterns are
parsed to find out if it does so; nothing is assumed of other tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

from ssmd.text.decoding import BYTE_OF
from ssmd.text.patterns import alternatives

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
