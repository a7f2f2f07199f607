"""Grammars of answers: read by llguidance against a model's own tokenizer, and followed by each choice token by token.

llguidance keeps a parser, and computes for every token of the vocabulary if the answer may go on with it. That takes
tens of microseconds, or milliseconds for hard grammars. It is done in a thread while the device computes the step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssmd.engine.sampling.bounds import check_size, keywords
from ssmd.engine.sampling.digits import DigitBound, DigitTable
from ssmd.engine.sampling.kept import GrammarMemory, KeptGuides
from ssmd.engine.sampling.refusals import parts_of, place_of, place_of_cost, worded
from ssmd.engine.sampling.trial import (
    MAX_FORCED,
    NO_ANSWER,
    PendingTrial,
    Trials,
    Verdict,
    error_of,
    is_plain,
    limits,
    opening_of,
)
from ssmd.engine.terms import Grammar, Rejection, Steps
from ssmd.machine.child import Packet
from ssmd.text.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 256 << 10  # size of a grammar; a schema of 1,000 properties has a tenth of it
FORCED_LEAST = 5  # forced tokens in a row from which on feeding them at once is quicker than steps
_THREADS = 2
_UNFIT = "doesn't satisfy the grammar"  # llguidance's error for a token that is not allowed
_MARK = b"\xff"  # prefix of a control token's name, as llguidance wants it

Floats = NDArray[np.float32]


class Grammars:
    """Reads grammars for one model. Used from many threads. Nothing is imported or made before the first grammar."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int], vocabulary: int) -> None:
        """Prepare for a model. vocabulary: number of its logits, which may be padded."""
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._stop_tokens = sorted(stop_tokens) or [vocabulary]  # without any: an id that cannot be drawn
        self._making = threading.Lock()
        self._kept = KeptGuides()
        self._trials = Trials(self._opening)

    def read(self, grammar: Grammar, client: str = "", *, wait: bool = True) -> Guide:
        """Return the guide of an answer from its beginning on; use `Guide.copy` for each choice.

        A grammar that is not plain is tried in a child process first, in the client's turn. If its verdict is not known
        yet, waits for it, or raises PendingTrial if `wait` is False. Raises Rejection, for a part of the grammar if
        that part is wrong by itself, and if the grammars in use leave no memory for this one.
        """
        with self._making:
            guide = self._kept.get(grammar)
            if guide is not None:
                return guide.copy()
        for one in (grammar, *grammar.parts):
            _check(one)
        plain = is_plain(grammar)
        nbytes = 0 if plain else self._judge(grammar, client, wait)
        with self._making:
            memory = self._kept.reserve(nbytes)
        guide = self._read(grammar, plain, memory)
        with self._making:
            self._kept.keep(grammar, guide)
            return guide.copy()

    def close(self) -> None:
        """End the child process. No new grammar can be read any more, except plain ones."""
        self._trials.close()

    def _judge(self, grammar: Grammar, client: str, wait: bool) -> int:
        """Return the bytes that a grammar takes by its trial. Raises Rejection if it failed, and PendingTrial."""
        parts: Sequence[Grammar] = grammar.parts
        verdict = self._verdict(grammar, parts, client, wait)
        while verdict.why:
            if verdict.part is not None and verdict.part < len(parts):
                grammar = parts[verdict.part]
            elif parts is not grammar.parts:  # none of the suspects fails by itself
                raise _refused(grammar, verdict)
            parts = [] if verdict.unsupported else _suspects(grammar, verdict.why)
            if not parts:
                raise _refused(grammar, verdict)
            verdict = self._verdict(grammar, parts, client, wait)
        return verdict.nbytes

    def _verdict(self, grammar: Grammar, parts: Sequence[Grammar], client: str, wait: bool) -> Verdict:
        pending = self._trials.verdict([self._text(one) for one in (grammar, *parts)], client)
        if not (wait or pending.done()):
            raise PendingTrial(pending)
        return pending.result()

    def _read(self, grammar: Grammar, plain: bool, memory: GrammarMemory) -> Guide:
        from llguidance import LLMatcher

        with self._making:
            known, threads = self._known, self._threads
            digits = DigitBound(self._digits) if grammar.numbers else None
        matcher = LLMatcher(known, self._text(grammar), log_level=0, limits=limits())
        guide = Guide(matcher, known, threads, self._vocabulary, grammar.param, memory, digits)
        endless = not matcher.is_error() and len(matcher.compute_ff_tokens()) > MAX_FORCED
        if endless or matcher.is_error() or not guide.goes_on:
            why = error_of(matcher) or NO_ANSWER
            for part in (*grammar.parts, *_suspects(grammar, why)) if plain else ():
                self._read(part, plain, memory)
            raise _refused(grammar, Verdict(why))
        return guide

    def _text(self, grammar: Grammar) -> str:
        return grammar.text if grammar.begun else _led(grammar.text, self._lead)

    def _opening(self) -> Packet:
        with self._making:
            tokens = self._tokens
        return opening_of(tokens.tokens, tokens.special_token_ids, self._stop_tokens)

    def warm_up(self) -> Steps:
        """Build in steps what the first grammar needs. Others' answers would wait for it, tenths of a second."""
        with self._making:
            _ = self._tokens
        yield
        with self._making:
            _ = self._known
        yield
        with self._making:
            _ = self._digits
        yield

    @cached_property
    def _lead(self) -> str:
        """Return the text that decoding puts before an answer's first token, and that the answer's text lacks."""
        decoding = self._tokenizer.decoding
        return decoding.separator.decode() or (" " if decoding.first_drops or decoding.strip[1] else "")

    @cached_property
    def _known(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        # llguidance takes any object that is like its own TokenizerWrapper.
        tokens: Any = self._tokens
        return LLTokenizer(tokens, n_vocab=len(tokens.tokens), eos_token=self._stop_tokens)

    @cached_property
    def _tokens(self) -> _Vocabulary:
        return _Vocabulary(self._tokenizer, self._stop_tokens, max(self._vocabulary, self._stop_tokens[-1] + 1))

    @cached_property
    def _digits(self) -> DigitTable:
        return DigitTable(self._tokens.tokens, self._stop_tokens)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, "ssmd-masks")  # they end with the last reference to it


class Guide:
    """The tokens that a choice may have next. For the worker only."""

    def __init__(
        self,
        matcher: LLMatcher,
        known: LLTokenizer,
        threads: ThreadPoolExecutor,
        vocabulary: int,
        param: str,
        memory: GrammarMemory,
        digits: DigitBound | None = None,
        first: Floats | None = None,
    ) -> None:
        """Begin an answer. param: of the request, for errors. digits: None for no bound. first: the first mask."""
        self.ended = False  # the grammar allows no more tokens but one that stops
        self.memory = memory  # of the grammar, for all copies
        self._matcher, self._known, self._threads = matcher, known, threads
        self._vocabulary, self._param = vocabulary, param
        self._digits = digits
        self._making: Future[None] | None = None
        if first is None:
            self._mask = np.empty((0, 8), np.float32)
            self._make()
        else:
            self._mask = first.copy()

    def copy(self) -> Guide:
        """Copy it for another choice, before any token was taken."""
        matcher, digits = self._matcher.deep_copy(), self._digits and self._digits.copy()
        known, threads = self._known, self._threads
        copy = Guide(matcher, known, threads, self._vocabulary, self._param, self.memory, digits, self._mask)
        self.memory.copies.add(copy)
        return copy

    @property
    def goes_on(self) -> bool:
        """Return True if any token is allowed."""
        return bool((self.mask() == 0).any())

    def mask(self) -> Floats:
        """Return the values to add to the logits [V]: 0 for an allowed token, else -inf. Raises Rejection."""
        if self._making is not None:
            self._making.result()
            self._making = None
            if self._matcher.is_error():
                raise self._failed()
        return self._mask.reshape(-1)[: self._vocabulary]

    def behind(self, text: str) -> Guide | None:
        """Copy it and advance past `text`, before any token was taken. None if no answer begins with that text."""
        copy, ids = self.copy(), self._known.tokenize_str(text)
        if copy._matcher.try_consume_tokens(ids) < len(ids):
            return None
        copy._making = self._threads.submit(copy._make)
        return copy

    def take(self, token: int, room: int = 0) -> list[int]:
        """Advance by an allowed token, and begin the next mask. Return the tokens that must follow.

        They are taken too: at most `room`, and none if they are too few to be fed at once. Raises Rejection.
        """
        self.mask()  # one thread at a time
        matcher, forced = self._matcher, list[int]()
        matcher.consume_token(token)
        if room >= FORCED_LEAST and not matcher.is_stopped():
            forced = matcher.compute_ff_tokens()[:room]
            if len(forced) < FORCED_LEAST:
                forced = []
            elif not matcher.consume_tokens(forced):
                raise self._failed()
        if matcher.is_error():
            raise self._failed()
        self.ended = matcher.is_stopped()
        if self._digits is not None:
            self._digits.take([token, *forced])
        if not self.ended:
            self._making = self._threads.submit(self._make)
        return forced

    def _make(self) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._mask.shape[0] != bits.size:
            self._mask = np.empty((bits.size, 8), np.float32)
        np.take(_BITS, bits, axis=0, out=self._mask)
        if self._digits is not None:
            self._digits.apply(self._mask.reshape(-1))

    def _failed(self) -> Rejection:
        why = worded(error_of(self._matcher))
        said = f"{self._param} cannot be followed any further: {why}"
        # A retry fails again. The grammar is at fault, unless a token was taken that it never allowed.
        return Rejection(said, status=500 if _UNFIT in why else 400, code="grammar_failed", param=self._param)


class _Vocabulary:
    """A model's tokens in llguidance's interface."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int], vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self.special_token_ids = [token for token in range(vocabulary) if tokenizer.is_control(token)]
        self.tokens = [self._bytes(token) for token in range(vocabulary)]
        self.eos_token_id = next(iter(stop_tokens))

    def _bytes(self, token: int) -> bytes:
        data = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_control(token):
            return _MARK + data
        return self._tokenizer.decoding.separator + data if data else b""

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode a text that must come: with the tokenizer, if its ids spell the very bytes.

        It must not raise: llguidance, its caller, cannot handle that.
        """
        data = text if isinstance(text, bytes) else text.encode(errors="replace")
        if not self._tokenizer.is_apart:  # else every mask would ask another process
            try:
                ids = self._tokenizer.encode(self._tokenizer.escape(data.decode()))
            except (TokenizerError, UnicodeDecodeError):
                ids = []
            if all(token < len(self.tokens) for token in ids) and b"".join(map(self.tokens.__getitem__, ids)) == data:
                return ids
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """Encode a text by the longest token that fits at each place. Stops where none fits."""
        ids, at = list[int](), 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest_bytes), at, -1)
            token = next((self._by_bytes[data[at:end]] for end in ends if data[at:end] in self._by_bytes), None)
            if token is None:
                break
            ids.append(token)
            at += len(self.tokens[token])
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: token for token, data in reversed([*enumerate(self.tokens)]) if data}

    @cached_property
    def _longest_bytes(self) -> int:
        return max(map(len, self.tokens), default=0)


def _bits() -> Floats:
    """Build, for each byte of a mask, what to add to the logits of its eight tokens [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(-np.inf)).astype(np.float32)


_BITS = _bits()


def _led(text: str, lead: str) -> str:
    """Build a grammar whose answers begin with `lead` in addition."""
    if not lead:
        return text
    inner = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    start = {"lark_grammar": f"start: {json.dumps(lead)} @answer"}
    return json.dumps({"grammars": [start, {**inner[0], "name": "answer"}, *inner[1:]]})


def _schema_of(text: str) -> Any:
    """Return the JSON schema of a grammar; None if it has none."""
    return json.loads(text)["grammars"][0].get("json_schema") if text.startswith("{") else None


def _check(grammar: Grammar) -> None:
    """Raise Rejection if a grammar is too large."""
    if (size := len(grammar.text.encode())) > MAX_BYTES:
        said = f"{grammar.param} comes to a grammar of {size} bytes, at most {MAX_BYTES} are possible"
        raise Rejection(said, code="invalid_value", param=grammar.param)
    check_size(_schema_of(grammar.text), grammar.param)


def _place(grammar: Grammar, why: str) -> str:
    """Return the path of the keyword that llguidance refuses, "" if that is unknown. why: llguidance's error."""
    schema = _schema_of(grammar.text)
    return "" if schema is None else place_of(keywords(schema, ""), why)


def _suspects(grammar: Grammar, why: str) -> list[Grammar]:
    """Return parts of a schema, of which one may be what llguidance refuses, if its error does not name the place."""
    schema = _schema_of(grammar.text)
    if schema is None or _place(grammar, why):
        return []
    parts = parts_of(schema, keywords(schema, ""), why)
    return [Grammar(json.dumps({"grammars": [{"json_schema": part}]}), grammar.param + way) for way, part in parts]


def _refused(grammar: Grammar, verdict: Verdict) -> Rejection:
    """Build the error for a grammar that llguidance refuses, or that met a limit in its trial."""
    place = place_of_cost(_schema_of(grammar.text)) if verdict.unsupported else _place(grammar, verdict.why)
    param = grammar.param + place
    unsupported = verdict.unsupported or _schema_of(grammar.text) is not None
    code = "unsupported_schema" if unsupported else "invalid_value"
    return Rejection(f"{param}: {worded(verdict.why)}", code=code, param=param)
