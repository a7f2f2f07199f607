"""Streamed detokenisation: from token ids to text, token by token."""

from __future__ import annotations

import codecs

from ssmd.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer, token by token: whole characters only, O(1) a token. Control tokens are left out."""

    def __init__(self, tokenizer: Tokenizer, *, begun: bool = False) -> None:
        """begun: the text continues an earlier one, so its first token is not the first of the whole text."""
        self._tokenizer = tokenizer
        self._decoding = tokenizer.decoding
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = not begun
        self._strip = 0 if begun else self._decoding.strip[1]

    def push(self, token: int) -> str:
        """Return the text that this token completes; "" while a character is unfinished."""
        if self._tokenizer.is_control(token):
            return ""
        data = self._tokenizer.token_bytes(token)
        if not self._first:
            return self._stripped(self._utf8.decode(self._decoding.separator + data if data else b""))
        piece = self._tokenizer.piece(token)
        if piece is None:
            return ""
        self._first = False
        if drops := self._decoding.first_drops:
            data = self._decoding.of(piece.replace(drops, ""))
        return self._stripped(self._utf8.decode(data))

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character at the end; "" if there is none."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._decoding.strip[0]):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
