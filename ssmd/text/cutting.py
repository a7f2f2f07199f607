"""Where a text can be cut such that its parts have the tokens that the whole has.

Most tokenizers first split a text by patterns that look at one run of letters, digits, spaces or signs at a time.
Between a letter or digit and a sign or space all of them split, whatever stands before and after: the match that ends
with the letter ends there at the end of a text, too, and the next one begins anew. Which tokenizers do so is found by
taking their patterns apart; of others nothing is assumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

PIECE = 1 << 15  # characters that are encoded at once, and somewhat more, to the next place for a cut
# Letters and digits of which every version of Unicode says so, and that nothing composes with what follows.
_WORDS = (
    "0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f\u0391-\u03a1\u03a3-\u03c9\u0400-\u045f\u05d0-\u05ea\u0621-\u063a"
    "\u0641-\u064a\u0905-\u0939\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
_SIGNS = r" \n\t.,;:!?\"，。、！？；：（"
# What a pattern may consist of: none of these matches a letter or a digit and then something else.
_OF_LETTERS = frozenset((r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+"))
_OF_DIGITS = frozenset((r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}"))
_OF_SIGNS = frozenset((r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"))
_SPACES = r"\s+"
_OTHERS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)")
_ALTERNATIVES = _OF_LETTERS | _OF_DIGITS | _OF_SIGNS | {_SPACES, r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]", *_OTHERS}


def places(library: tokenizers.Tokenizer, added: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """A pattern that ends where a text may be cut, in the midst of which no control token stands; None if unknown."""
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
    """Cut a text into pieces of some `PIECE` characters; where there is no place for a cut they are longer."""
    at = 0
    while place is not None and len(text) - at > PIECE:
        found = None
        look = at + PIECE
        while found is None and look < len(text):  # not all at once: a search holds up every other thread
            found = place.search(text, look, min(len(text), look + PIECE + 1))
            look += PIECE
        if found is None or found.end() >= len(text):
            break
        yield text[at : found.end()]
        at = found.end()
    yield text[at:]


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else dict(json.loads(part.__getstate__()))


def _is_known(step: dict[str, Any]) -> bool:
    found = _alternatives(step)
    return step.get("type") in ("ByteLevel", "Digits") or (bool(found) and _ALTERNATIVES.issuperset(found))


def _separates(step: dict[str, Any]) -> bool:
    """Whether every character belongs to a match: what stands between matches is one part, whatever it is of."""
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex"))
    found = set(_alternatives(step))
    return all(not found.isdisjoint(kind) for kind in (_OF_LETTERS, _OF_DIGITS, _OF_SIGNS, (_SPACES,)))


def _splits_digits(step: dict[str, Any]) -> bool:
    """Whether every digit is a part of its own."""
    alone = {r"\p{N}"} == _OF_DIGITS.intersection(_alternatives(step))
    return alone or (step.get("type") == "Digits" and bool(step.get("individual_digits")))


def _alternatives(step: dict[str, Any]) -> list[str]:
    """The alternatives of a pattern that cuts out all its matches, those within parentheses not taken apart."""
    if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
        return []
    found, depth = [""], 0
    for c in step.get("pattern", {}).get("Regex", ""):
        depth += (c == "(") - (c == ")")
        if c == "|" and not depth:
            found.append("")
        else:
            found[-1] += c
    return found


def matches(
    pattern: re.Pattern[str], text: str, start: int, stop: int, longest: int, piece: int = PIECE
) -> Iterator[re.Match[str]]:
    """All that a pattern finds in a text, a piece of it at a time: a search holds up every other thread.

    longest: characters that a match can have.
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
