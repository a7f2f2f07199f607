"""Text to token ids and back, whole or streamed, with tokenizer.json through the `tokenizers` library.

Control tokens (vocabulary.py) count only where a template wrote them. `escape` makes their text in a message inert
before rendering, and `encode` turns it back into plain text.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ssmd.text.beginning import read_beginning
from ssmd.text.vocabulary import (
    FRAME,
    PIECE,
    Controls,
    ControlsError,
    DecoderError,
    Decoding,
    count_parts,
    each_part_counts,
    pieces,
    places,
    read_decoder,
)

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork, and one text needs none
MAX_FILE_BYTES = 256 << 20
MAX_WHOLE = 512 << 10  # characters encoded at once where the text cannot be cut: each takes up to 400 bytes
MAX_HOLDING = 64  # results of `holding` that are cached
MAX_TOKEN = 4096  # characters of a token; the longest in use have some hundreds
_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # marks hold no digits: a text may be cut between two digits
_PROBES = ("a", " a", "  a", "\na", "é", ".", "▁a", "1")


class TokenizerError(ValueError):
    """A tokenizer.json that cannot be used, or text or ids that cannot be converted."""


@dataclass(frozen=True)
class Reader:
    """A reader in another process that has opened the same file with the same nonce. It replaces the library here.

    start_matters: its result for `Tokenizer.start_matters`. read: returns the ids of a piece of marked text.
    """

    nonce: str
    start_matters: bool
    read: Callable[[str], NDArray[np.int32]]


class Tokenizer:
    """A model's tokenizer, made by `open`. Safe to use from several threads.

    start_matters: text is encoded differently at the very start than after a control token. beginning: ids that the
    file puts before every text; templates write them themselves.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        decoding: Decoding,
        stop_tokens: Sequence[int],
        nonce: str,
        reader: Reader | None,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        named: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if (longest := max(map(len, named), default=0)) > MAX_TOKEN:
            raise TokenizerError(f"the tokenizer has a token of {longest} characters, at most {MAX_TOKEN} are allowed")
        self.vocabulary: int = max(named.values(), default=-1) + 1
        self._known: NDArray[np.intp] = np.array([*named.values(), *stop_tokens], np.intp)
        self._padding: dict[int, NDArray[np.intp]] = {}
        added: dict[int, tokenizers.AddedToken] = library.get_added_tokens_decoder()
        self._controls = Controls(added, stop_tokens, normalizes=library.normalizer is not None)
        self._special = self._controls.special
        self._structure = {*self._special, *stop_tokens}
        self._library = library
        self.decoding = decoding
        processor = library.post_processor
        self.beginning = read_beginning(None if processor is None else processor.__getstate__())
        self._bytes: dict[int, bytes] = {}
        self._holding: dict[tuple[str, ...], frozenset[int]] = {}

        # The library is set to encode special tokens' text as plain text. A control token that a template wrote is
        # replaced by a mark, which the library has as a token of its own. A client cannot guess the marks.
        library.encode_special_tokens = True
        nonce = nonce.translate(_LETTERS)
        self._mark_of = {token: f"{FRAME}{nonce}{str(token).translate(_LETTERS)}{FRAME}" for token in self._special}
        self._break = f"{FRAME}{nonce}break{FRAME}"
        library.add_tokens(
            [_mark(self._mark_of[token], added[token]) for token in self._special] + [_mark(self._break, None)]
        )
        self._control_of_mark = {library.token_to_id(mark): token for token, mark in self._mark_of.items()}
        self._break_id = library.token_to_id(self._break)

        self._place = places(library, added.values())
        self._counts = self._place is not None and each_part_counts(library)
        self._reader = reader
        self.start_matters = self._probe_start() if reader is None else reader.start_matters

    @property
    def is_apart(self) -> bool:
        """True if texts are encoded in another process."""
        return self._reader is not None

    @staticmethod
    def open(
        path: Path,
        *,
        stop_tokens: Sequence[int] = (),
        nonce: str | None = None,
        reader: Reader | None = None,
        sha256: str | None = None,
    ) -> Tokenizer:
        """Read a tokenizer.json. Raises TokenizerError.

        stop_tokens: control tokens even if the file does not mark them special. nonce: 24 random hexadecimal digits; a
        reader's nonce is used instead. sha256: the hash that the file must have; None accepts any file.
        """
        data = tokenizer_bytes(path)
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise TokenizerError(f"{path} was altered meanwhile")
        try:
            library = tokenizers.Tokenizer.from_buffer(data)
            decoder = library.decoder
            decoding = read_decoder(decoder.__getstate__() if decoder is not None else None)
        except DecoderError as err:
            raise TokenizerError(f"{path}: {err}; ssmd reads byte-level and SentencePiece-like tokenizers") from err
        except Exception as err:  # the library raises plain Exception
            raise TokenizerError(f"{path} is not a tokenizer.json: {err}") from err
        try:
            nonce = reader.nonce if reader is not None else nonce or secrets.token_hex(12)
            return Tokenizer(library, decoding, stop_tokens, nonce, reader)
        except ControlsError as err:
            raise TokenizerError(str(err)) from err
        except BaseException as err:
            if _gave_up(err):
                raise TokenizerError(f"{path} cannot be used: {str(err)[:200]}") from None
            raise

    def escape(self, content: str) -> str:
        """Make control tokens' text in a message inert, undone by `unescape`."""
        return self._controls.escape(content)

    def unescape(self, text: str) -> str:
        """Turn an escaped text into the plain one again; `unescape(escape(text)) == text`."""
        return self._controls.unescape(text)

    def padding(self, size: int) -> NDArray[np.intp]:
        """Return the ids below `size` that no token has: models pad their logits, and vocabularies have gaps."""
        found = self._padding.get(size)
        if found is None:
            free = np.ones(size, np.bool_)
            free[self._known[self._known < size]] = False
            found = self._padding[size] = np.flatnonzero(free)
        return found

    def quote(self, text: str) -> str:
        """Quote characters of the text that `escape` uses itself. Control tokens' text in it still counts."""
        return self._controls.quote(text)

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of rendered template text as a list, like `ids`."""
        found: list[int] = self.ids(rendered).tolist()
        return found

    def ids(
        self, rendered: str, at_most: int | None = None, go_on: Callable[[], None] = lambda: None
    ) -> NDArray[np.int32]:
        """Return the ids of rendered template text, without BOS. Escaped parts become plain text, not control tokens.

        Equals the library's `encode(rendered, add_special_tokens=False)` where nothing is escaped. Other threads run
        meanwhile. at_most: if there are more ids than this, the result may end anywhere after that many. go_on: called
        before each piece; it may raise. Raises TokenizerError if the text is not Unicode, if it cannot be
        distinguished from a control token, or if the library fails.
        """
        found, count = [], 0
        for piece in self._pieces(rendered):
            go_on()
            found.append(self.read(piece))
            count += len(found[-1])
            if at_most is not None and count > at_most:
                break
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def fewest(self, text: str, enough: int) -> int:
        """Return a number of ids that a text has at the least, without encoding it: in a thirtieth of the time.

        Counts no further than just above `enough`. It is 0 for tokenizers that this is not known of.
        """
        return count_parts(text, self._place, enough) if self._counts and self._place is not None else 0

    def _pieces(self, rendered: str) -> Iterator[str]:
        """Yield pieces of the text whose ids together are those of the whole, with marks for control tokens."""
        if self._place is not None or len(rendered) <= PIECE:
            yield from pieces(self._marked(rendered), self._place)
            return
        at = 0
        for cut in self._cuts(rendered, len(rendered)):
            if cut - at >= PIECE:
                yield self._marked(rendered[at:cut])
                at = cut
        yield self._marked(rendered[at:])

    def _marked(self, rendered: str) -> str:
        parts = self._controls.parts(rendered)
        return "".join(part if isinstance(part, str) else self._mark_of[part] for part in parts)

    def read(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text with marks for control tokens. Raises TokenizerError."""
        if len(text) > MAX_WHOLE:
            raise TokenizerError(
                f"the text holds {len(text)} characters in a row that this tokenizer can only read at once; "
                f"at most {MAX_WHOLE} are allowed, so break them up"
            )
        if self._reader is not None:
            return self._reader.read(text)
        for _ in range(8):
            ids: list[int] = self._run(self._library.encode_batch_fast, text).ids
            if self._special.keys().isdisjoint(ids):
                kept = [self._control_of_mark.get(token, token) for token in ids if token != self._break_id]
                return np.array(kept, "<i4")
            # Some models hold the control token's text as an ordinary piece too: cut such a piece in two.
            encoding = self._run(self._library.encode_batch, text)
            forged = [encoding.offsets[i] for i, token in enumerate(encoding.ids) if token in self._special]
            for start, end in reversed(forged):
                middle = max(start + 1, (start + end) // 2)
                text = text[:middle] + self._break + text[middle:]
        raise TokenizerError("a message holds text that this tokenizer cannot tell apart from a control token")

    def _run(self, encode: Callable[..., Any], text: str) -> Any:
        """Return the encoding of one text. It is passed as a batch, as the library frees the GIL only for batches."""
        try:
            return encode([text], add_special_tokens=False)[0]
        except TypeError:
            raise TokenizerError("the text holds half of a surrogate pair, which is not Unicode") from None
        except BaseException as err:
            if isinstance(err, Exception) or _gave_up(err):
                raise TokenizerError(f"the tokenizer cannot read the text: {str(err)[:200]}") from None
            raise

    def ends_at_control(self, rendered: str, at: int) -> bool:
        """Return True if encoding rendered[:at] and rendered[at:] separately gives the ids of the whole.

        True at 0, at the end, and where a control token ends or starts, including the spaces that it strips.
        """
        if at <= 0 or at >= len(rendered):
            return at in (0, len(rendered))
        return any(cut == at for cut in self._cuts(rendered, at))

    def last_cut(self, rendered: str, limit: int) -> int:
        """Return the greatest position <= `limit` where `ends_at_control` is True. O(length) in all."""
        return limit if limit == len(rendered) else max(self._cuts(rendered, limit), default=0)

    def _cuts(self, rendered: str, limit: int) -> Iterator[int]:
        return self._controls.cuts(rendered, limit, behind=not self.start_matters)

    def spells(self, ids: Sequence[int], rendered: str) -> bool:
        """Return True if the ids spell this rendered text, with control tokens exactly where it has them.

        They may differ from the ids of `encode`: sampled tokens may divide the text elsewhere.
        """
        found: list[str | int] = []
        piece = bytearray()
        for token in ids:
            if self.is_control(token):
                found += [piece.decode(errors="replace"), token]
                piece.clear()
            elif not (data := self.token_bytes(token)):
                return False  # an id without bytes
            else:
                piece += data
        return [*found, piece.decode(errors="replace")] == list(self._controls.parts(rendered))

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, for a control token those of its name; b"" for an id outside the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            if token in self._special:
                known = self._special[token].encode()
            else:
                piece = self.piece(token)
                known = b"" if piece is None else self.decoding.of(piece)
            self._bytes[token] = known
        return known

    def piece(self, token: int) -> str | None:
        """Return the token as in the vocabulary; None if the id is not in it (models pad their logits)."""
        piece: str | None = self._library.id_to_token(token) if 0 <= token < self.vocabulary else None
        return piece

    def token_text(self, token: int) -> str:
        """Return a token's text, with U+FFFD for part of a character."""
        return self.token_bytes(token).decode(errors="replace")

    def holding(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Return the tokens that contain one of these texts. The first call takes about 0.1 s; results are cached."""
        if texts not in self._holding:
            if len(self._holding) >= MAX_HOLDING:
                self._holding.clear()
            wanted = [text.encode() for text in texts]
            found = (t for t in range(self.vocabulary) if any(text in self.token_bytes(t) for text in wanted))
            self._holding[texts] = frozenset(found)
        return self._holding[texts]

    def is_control(self, token: int) -> bool:
        """Return True if a token marks structure or ends the answer, and is not part of the text."""
        return token in self._structure

    def _probe_start(self) -> bool:
        """Return True if text is encoded differently at the very start than after a control token.

        A tokenizer that prepends a space does so, for example.
        """
        for token, mark in self._mark_of.items():
            a = self._controls.added[token]
            if a.lstrip or a.rstrip or a.single_word:
                continue
            return any(
                self._library.encode(mark + probe, add_special_tokens=False).ids[1:]
                != self._library.encode(probe, add_special_tokens=False).ids
                for probe in _PROBES
            )
        return True


def tokenizer_bytes(path: Path) -> bytes:
    """Return the bytes of a tokenizer.json. Raises TokenizerError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TokenizerError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as err:
        raise TokenizerError(f"{path} cannot be read: {err.strerror or err}") from err


def _gave_up(err: BaseException) -> bool:
    """Return True if the library panicked, for example over a regular expression. A panic is not an Exception."""
    return type(err).__name__ == "PanicException"


def _mark(text: str, like: tokenizers.AddedToken | None) -> tokenizers.AddedToken:
    flags = {"lstrip": like.lstrip, "rstrip": like.rstrip, "single_word": like.single_word} if like else {}
    return tokenizers.AddedToken(text, normalized=False, special=False, **flags)


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
        """Return U+FFFD if the text ends within a character, else ""."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._decoding.strip[0]):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
