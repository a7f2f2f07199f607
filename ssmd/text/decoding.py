"""The decoder of a tokenizer.json, read as one rule from a token to its bytes.

Two families are supported: byte-level vocabularies (GPT-2's table of printable stand-ins for bytes), and SentencePiece
ones ("▁" for a space, `<0xE2>` for a byte). With a rule per token, text is streamed without looking back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
