"""Text to token ids and back, with tokenizer.json through the `tokenizers` library.

Control tokens (added tokens marked special: turn marks, BOS, …) count only where a template wrote them. Their text in a
message is made inert by `escape` before rendering, and `encode` turns it into the plain text that it was.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ssmd.text.cutting import PIECE, matches, pieces, places
from ssmd.text.decoding import DecoderError, Decoding, read_decoder

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork, and one text needs none
MAX_FILE_BYTES = 256 << 20
MAX_WHOLE = 512 << 10  # characters that have to be encoded at once: each takes up to 400 bytes then
# Supplementary Private Use Area-B: a character per control token, one that quotes, one that frames the library's marks.
FIRST_SENTINEL = 0x100000
MAX_CONTROLS = 0xFF00
MAX_TOKEN = 4096  # characters; the longest in use have some hundreds
MAX_BRANCHES = 100  # where a text may go on as one added token or as another; runs of 30 spaces or lines are in use
MAX_ADDED = 256 << 10  # characters of all added tokens; the most in use have 80,000
_SEARCHED = 1 << 26  # characters compared in one search at most: some 50 ms, for which it holds up other threads
QUOTE = chr(0x10FFF0)
FRAME = chr(0x10FFF1)
_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # for digits, between which a text may be cut
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
_SPACES_AFTER = re.compile(f"[{_SPACES}]*")
_EACH_SPACE = "".join(re.findall(f"[{_SPACES}]", "".join(map(chr, range(0x3001)))))
_PROBES = ("a", " a", "  a", "\na", "é", ".", "▁a", "1")


class TokenizerError(ValueError):
    """A tokenizer.json that cannot be used, or text or ids that cannot be converted."""


@dataclass(frozen=True)
class Reader:
    """Who reads texts in place of the library here: one that has opened the same file, with the same nonce.

    start_matters: what it found out by reading (`Tokenizer.start_matters`). read: the ids of a piece of marked text.
    """

    nonce: str
    start_matters: bool
    read: Callable[[str], NDArray[np.int32]]


class Tokenizer:
    """A model's tokenizer, made by `open`. Safe to use from several threads.

    start_matters: whether text is read differently at the very start than after a control token.
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
        added: dict[int, tokenizers.AddedToken] = library.get_added_tokens_decoder()
        self._special = {token: str(a.content) for token, a in added.items() if a.special or token in stop_tokens}
        if len(self._special) > MAX_CONTROLS or any(_is_reserved(c) for text in self._special.values() for c in text):
            raise TokenizerError("the tokenizer has too many special tokens, or some with private-use characters")
        named: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if (longest := max(map(len, named), default=0)) > MAX_TOKEN:
            raise TokenizerError(f"the tokenizer has a token of {longest} characters, at most {MAX_TOKEN} are allowed")
        self.vocabulary: int = max(named.values(), default=-1) + 1
        self._controls = set(self._special) | set(stop_tokens)
        self._library = library
        self.decoding = decoding
        self._bytes: dict[int, bytes] = {}
        self._added = added

        # The library is told to take special tokens' text for plain text. Where a template wrote a control token, it
        # is replaced by a mark that the library knows as a token of its own; nobody can guess the marks.
        library.encode_special_tokens = True
        nonce = nonce.translate(_LETTERS)
        self._mark_of = {token: f"{FRAME}{nonce}{str(token).translate(_LETTERS)}{FRAME}" for token in self._special}
        self._break = f"{FRAME}{nonce}break{FRAME}"
        library.add_tokens(
            [_mark(self._mark_of[token], added[token]) for token in self._special] + [_mark(self._break, None)]
        )
        self._control_of_mark = {library.token_to_id(mark): token for token, mark in self._mark_of.items()}
        self._break_id = library.token_to_id(self._break)

        self._sentinel_of = {text: chr(FIRST_SENTINEL + i) for i, text in enumerate(sorted(self._special.values()))}
        self._text_of = {sentinel: text for text, sentinel in self._sentinel_of.items()}
        reserved = f"[{chr(FIRST_SENTINEL)}-{chr(FIRST_SENTINEL + MAX_CONTROLS)}{QUOTE}{FRAME}]"
        self._to_escape = re.compile("|".join([reserved, *_longest(sorted(set(self._special.values())))]))
        self._to_unescape = re.compile(f"{QUOTE}(.?)|{reserved}", re.DOTALL)
        self._passes = [
            _any_of(text for a in added.values() if (text := str(a.content)) and bool(a.normalized) is normalized)
            for normalized in (False, True)
        ]
        self._by_text = {str(a.content): (token, a) for token, a in added.items()}
        spelt = sum(len(text) for text in self._by_text)
        if spelt > MAX_ADDED:
            raise TokenizerError(f"the added tokens have {spelt} characters, at most {MAX_ADDED} are allowed")
        self._piece = min(PIECE, _SEARCHED // max(1, spelt))  # for each place may be compared with all of them
        self._longest = max((len(text) for text in (*self._by_text, QUOTE + " ")), default=0)
        self._place = places(library, added.values())
        self._reader = reader
        self.start_matters = self._probe_start() if reader is None else reader.start_matters

    @staticmethod
    def open(
        path: Path,
        *,
        stop_tokens: Sequence[int] = (),
        nonce: str | None = None,
        reader: Reader | None = None,
        sha256: str | None = None,
    ) -> Tokenizer:
        """Read a tokenizer.json. `stop_tokens` are control tokens whatever the file says. Raises TokenizerError.

        nonce: what nobody can guess, of 24 hexadecimal digits; of the `reader` if there is one. sha256: of the file
        that it has to be, if it has to be a certain one.
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
        except BaseException as err:
            if _gave_up(err):
                raise TokenizerError(f"{path} cannot be used: {str(err)[:200]}") from None
            raise

    def escape(self, content: str) -> str:
        """Make control tokens' text in a message inert: a private-use character each, undone by `unescape`."""
        return self._replaced(self._to_escape, content, lambda m: self._sentinel_of.get(m[0]) or QUOTE + m[0])

    def unescape(self, text: str) -> str:
        """Turn an escaped text into the plain one again; `unescape(escape(text)) == text`."""
        return self._replaced(
            self._to_unescape, text, lambda m: m[1] if m[1] is not None else self._text_of.get(m[0], m[0])
        )

    def _replaced(self, pattern: re.Pattern[str], text: str, by: Callable[[re.Match[str]], str]) -> str:
        parts, at = [], 0
        for found in matches(pattern, text, 0, len(text), self._longest, self._piece):
            parts += [text[at : found.start()], by(found)]
            at = found.end()
        return "".join([*parts, text[at:]]) if parts else text

    def encode(self, rendered: str) -> list[int]:
        """Ids of rendered template text, no BOS added, as `ids`."""
        found: list[int] = self.ids(rendered).tolist()
        return found

    def ids(
        self, rendered: str, at_most: int | None = None, go_on: Callable[[], None] = lambda: None
    ) -> NDArray[np.int32]:
        """Ids of rendered template text, no BOS added. Escaped parts become plain text, never a control token.

        Equals the library's `encode(rendered, add_special_tokens=False)` where nothing is escaped. at_most: of more
        than so many the first ones, at least so many, are enough. go_on: is called now and then, and may raise. Other
        threads go on meanwhile. Raises TokenizerError if the text is no Unicode or cannot be told apart from a control
        token, or the library gives up.
        """
        found, count = [], 0
        for piece in self._pieces(rendered):
            go_on()
            found.append(self.read(piece))
            count += len(found[-1])
            if at_most is not None and count > at_most:
                break
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def _pieces(self, rendered: str) -> Iterator[str]:
        """Texts that have the ids of the whole, one after the other; with marks for control tokens."""
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
        parts, at = [], 0
        for start, end, token in self._control_matches(rendered):
            parts += [self.unescape(rendered[at:start]), self._mark_of[token]]
            at = end
        return "".join(parts) + self.unescape(rendered[at:])

    def read(self, text: str) -> NDArray[np.int32]:
        """The ids of a text with marks for control tokens. Raises TokenizerError."""
        if len(text) > MAX_WHOLE:
            raise TokenizerError(
                f"it holds {len(text)} characters in a row that this tokenizer can only read at once; "
                f"{MAX_WHOLE} are possible, so break them up"
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
        """The encoding of one text. Batches alone, even of one, let other threads go on."""
        try:
            return encode([text], add_special_tokens=False)[0]
        except TypeError:
            raise TokenizerError("the text holds half of a surrogate pair, which is not Unicode") from None
        except BaseException as err:
            if isinstance(err, Exception) or _gave_up(err):
                raise TokenizerError(f"the tokenizer cannot read the text: {str(err)[:200]}") from None
            raise

    def ends_at_control(self, rendered: str, at: int) -> bool:
        """Whether encoding rendered[:at] and rendered[at:] apart gives the ids of the whole.

        True at 0, at the end, and where a control token ends or starts (with the spaces that it swallows, if any).
        """
        if at <= 0 or at >= len(rendered):
            return at in (0, len(rendered))
        return any(cut == at for cut in self._cuts(rendered, at))

    def last_cut(self, rendered: str, limit: int) -> int:
        """The greatest position <= `limit` where `ends_at_control` holds. O(length), where trying them all is not."""
        return limit if limit == len(rendered) else max(self._cuts(rendered, limit), default=0)

    def _cuts(self, rendered: str, limit: int) -> Iterator[int]:
        """Where a control token starts or ends such that the text can be cut there, up to `limit`, in order."""
        floor = 0
        for start, end, token in self._control_matches(rendered):
            a = self._added[token]
            before = start - floor - len(rendered[floor:start].rstrip(_EACH_SPACE)) if a.lstrip else 0
            after = _SPACES_AFTER.match(rendered, end) if a.rstrip else None
            first, floor = start - before, after.end() if after else end
            if first > limit:
                return
            # single_word looks at its neighbours, and a normalized token is found only after normalisation.
            if a.single_word or (a.normalized and self._library.normalizer is not None):
                continue
            if not self._within_a_word(rendered, first):
                yield first
            if floor <= limit and not self.start_matters and not self._within_a_word(rendered, floor):
                yield floor

    def _within_a_word(self, rendered: str, at: int) -> bool:
        """Whether a token that must stand alone would begin or end here, if the text did: `<|end|>x`, then `BOS`."""
        inside = 0 < at < len(rendered) and _is_word(rendered[at - 1]) and _is_word(rendered[at])
        return inside and any(a.single_word for a in self._added.values())

    def spells(self, ids: Sequence[int], rendered: str) -> bool:
        """Whether the ids stand for this rendered text, control tokens exactly where it has them.

        They need not be the ids that `encode` would choose: sampled ones may cut the text elsewhere.
        """
        expected: list[str | int] = []
        at = 0
        for start, end, token in self._control_matches(rendered):
            expected += [self.unescape(rendered[at:start]), token]
            at = end
        expected.append(self.unescape(rendered[at:]))
        found: list[str | int] = []
        piece = bytearray()
        for token in ids:
            if self.is_control(token):
                found += [piece.decode(errors="replace"), token]
                piece.clear()
            elif not (data := self.token_bytes(token)):
                return False  # an id that stands for nothing
            else:
                piece += data
        return [*found, piece.decode(errors="replace")] == expected

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for (a control token: its name); b"" for an id that is not in the vocabulary."""
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
        """The token as it stands in the vocabulary, None if it is not there (models pad their logits)."""
        piece: str | None = self._library.id_to_token(token) if 0 <= token < self.vocabulary else None
        return piece

    def token_text(self, token: int) -> str:
        """The text of a token; U+FFFD where it is only a part of a character."""
        return self.token_bytes(token).decode(errors="replace")

    def is_control(self, token: int) -> bool:
        """Whether a token marks structure (or ends the answer) and is no part of the text."""
        return token in self._controls

    def _control_matches(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, token) of the control tokens in order, found as the library finds them.

        Leftmost, then longest, first among the added tokens that are matched on raw text, then among the others.
        """
        raw, normalized = self._passes
        at = 0
        for start, end, token in self._matches(raw, text, 0, len(text)):
            yield from self._special_matches(normalized, text, at, start)
            if token in self._special:
                yield start, end, token
            at = end
        yield from self._special_matches(normalized, text, at, len(text))

    def _special_matches(
        self, pattern: re.Pattern[str] | None, text: str, start: int, stop: int
    ) -> Iterator[tuple[int, int, int]]:
        return (m for m in self._matches(pattern, text, start, stop) if m[2] in self._special)

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

    def _probe_start(self) -> bool:
        """Whether text is encoded differently at the very start than after a control token (a prepended space)."""
        for token, mark in self._mark_of.items():
            a = self._added[token]
            if a.lstrip or a.rstrip or a.single_word:
                continue
            return any(
                self._library.encode(mark + probe, add_special_tokens=False).ids[1:]
                != self._library.encode(probe, add_special_tokens=False).ids
                for probe in _PROBES
            )
        return True


def tokenizer_bytes(path: Path) -> bytes:
    """A tokenizer.json as it lies there. Raises TokenizerError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TokenizerError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as err:
        raise TokenizerError(f"{path} cannot be read: {err.strerror or err}") from err


def _gave_up(err: BaseException) -> bool:
    """Whether the library stopped in the midst, on a regular expression that goes too far, say. No Exception tells."""
    return type(err).__name__ == "PanicException"


def _mark(text: str, like: tokenizers.AddedToken | None) -> tokenizers.AddedToken:
    flags = {"lstrip": like.lstrip, "rstrip": like.rstrip, "single_word": like.single_word} if like else {}
    return tokenizers.AddedToken(text, normalized=False, special=False, **flags)


def _any_of(texts: Iterator[str]) -> re.Pattern[str] | None:
    ordered = sorted(set(texts))
    return re.compile("|".join(_longest(ordered))) if ordered else None


def _longest(texts: list[str], depth: int = 0) -> Iterator[str]:
    """Expressions of which at most one matches at a place: the longest of these sorted texts that stands there.

    What texts have in common is looked at once: 700 of a's and a Z in a text of a's would take seconds.
    """
    if depth > MAX_BRANCHES:
        raise TokenizerError(f"more than {MAX_BRANCHES} added tokens begin alike, one within the other")
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
