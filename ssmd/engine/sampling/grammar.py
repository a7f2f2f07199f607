"""Grammars of answers: read by llguidance against a model's own tokenizer, and followed by each choice token by token.

llguidance keeps a parser, and computes for every token of the vocabulary if the answer may go on with it. That takes
tens of microseconds, or milliseconds for hard grammars. It is done in a thread while the device computes the step.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssmd.engine.sampling.digits import DigitBound, DigitTable
from ssmd.engine.sampling.refusals import parts_of, place_of, worded
from ssmd.engine.terms import Grammar, Rejection, Steps
from ssmd.text.schemas import (
    LEAST,
    MAX_KEYS,
    MAX_PATTERN_CHARS,
    MAXIMUM,
    MOST,
    EnforceableSchema,
    UnsupportedSchema,
    enforceable,
    resolve,
    step,
)
from ssmd.text.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_BYTES = 256 << 10  # size of a grammar; a schema of 1,000 properties has a tenth of it
MAX_FORCED = 5000  # tokens that a grammar may force at an answer's beginning
FORCED_LEAST = 5  # forced tokens in a row from which on feeding them at once is quicker than steps
_THREADS = 2
_KEPT = 8  # grammars kept after they were read: each turn sends its tools and schemas again
_MAX_KEPT_CHARS = 8 << 10  # length of a schema that is kept as it is enforced: each turn sends its tools again
_UNFIT = "doesn't satisfy the grammar"  # llguidance's error for a token that is not allowed
_MARK = b"\xff"  # prefix of a control token's name, as llguidance wants it

Floats = NDArray[np.float32]

MAX_PARTS = 500  # properties of one object, or schemas of one list: the time to read them grows with the square
MAX_LEVELS = 1000  # levels, through references too: recursion overflows the stack, and ends the process, at 3,000

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")

MAX_LARK_BYTES = 32 << 10
MAX_RULES = 256  # rules: recursion overflows the stack, and ends the process, at 3,000

# Any of these may force a part of an answer without end, as in A+ "A": the repetition takes every "A".
_ENDLESS = re.compile(r"[*+~\\]|,\s*\}|x-guidance|%regex")
_ONE_BY_ONE = '\n%llguidance {"no_forcing": true}\n'  # the last option counts
_RULE = re.compile(r"[\w\]}]\s*:")
_SCHEMA = re.compile(r"%json\s*(?=[{\[\"])")


class Grammars:
    """Reads grammars for one model. Used from many threads. Nothing is imported or made before the first grammar."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int], vocabulary: int) -> None:
        """Prepare for a model. vocabulary: number of its logits, which may be padded."""
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._stop_tokens = sorted(stop_tokens) or [vocabulary]  # without any: an id that cannot be drawn
        self._making = threading.Lock()
        self._kept: OrderedDict[Grammar, Guide] = OrderedDict()  # last used last

    def read(self, grammar: Grammar) -> Guide:
        """Return the guide of an answer from its beginning on; use `Guide.copy` for each choice.

        Raises Rejection, for a part of the grammar if that part is wrong by itself.
        """
        with self._making:
            guide = self._kept.pop(grammar, None)
            if guide is not None:
                self._kept[grammar] = guide
                return guide.copy()
        guide = self._read(grammar)
        with self._making:
            self._kept[grammar] = guide
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return guide.copy()

    def _read(self, grammar: Grammar) -> Guide:
        from llguidance import LLMatcher

        if (size := len(grammar.text.encode())) > MAX_BYTES:
            said = f"{grammar.param} comes to a grammar of {size} bytes, at most {MAX_BYTES} are possible"
            raise Rejection(said, code="invalid_value", param=grammar.param)
        schema = _schema_of(grammar.text)
        check_size(schema, grammar.param)
        with self._making:
            known, threads = self._known, self._threads
            digits = DigitBound(self._digits) if grammar.numbers else None
        text = grammar.text if grammar.begun else _led(grammar.text, self._lead)
        matcher = LLMatcher(known, text, log_level=0, limits=_limits())
        guide = Guide(matcher, known, threads, self._vocabulary, grammar.param, digits)
        endless = not matcher.is_error() and len(matcher.compute_ff_tokens()) > MAX_FORCED
        if endless or matcher.is_error() or not guide.goes_on:
            for part in grammar.parts:
                self._read(part)
            why = matcher.get_error().replace("<non-verbose/>", "").strip()
            place = "" if schema is None else place_of(_keywords(schema, ""), why)
            if not place:
                for way, part in parts_of(schema, _keywords(schema, ""), why):  # the wrong one is refused with its path
                    text = json.dumps({"grammars": [{"json_schema": part}]})
                    self._read(Grammar(text, grammar.param + way))
            param = grammar.param + place
            why = worded(why) or "no answer is possible: it would never end, or this model's vocabulary has none"
            code = "invalid_value" if schema is None else "unsupported_schema"
            raise Rejection(f"{param}: {why}", code=code, param=param)
        return guide

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
        digits: DigitBound | None = None,
        first: Floats | None = None,
    ) -> None:
        """Begin an answer. param: of the request, for errors. digits: None for no bound. first: the first mask."""
        self.ended = False  # the grammar allows no more tokens but one that stops
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
        return Guide(matcher, self._known, self._threads, self._vocabulary, self._param, digits, self._mask)

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
        why = _said(self._matcher)
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


def _limits() -> LLParserLimits:
    """Return bounds of time and memory: about 100 ms to read a grammar, some ms for a mask. Beyond that it fails."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


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


def _with_schema(text: str, schema: Any) -> str:
    """Return the grammar of a JSON schema with another in its place."""
    first, *others = json.loads(text)["grammars"]
    return json.dumps({"grammars": [{**first, "json_schema": schema}, *others]})


def _said(matcher: LLMatcher) -> str:
    """Return llguidance's error."""
    return worded(matcher.get_error())


def enforced(schema: Any, param: str) -> EnforceableSchema:
    """Return a schema as llguidance can enforce it. param: of the request. Raises Rejection."""
    text = json.dumps(schema)
    try:
        return _enforceable(text) if len(text) <= _MAX_KEPT_CHARS else enforceable(schema)
    except UnsupportedSchema as err:
        raise _unsupported(param + err.way, err.why) from None


@lru_cache(maxsize=64)
def _enforceable(text: str) -> EnforceableSchema:
    return enforceable(json.loads(text))


def check_size(schema: Any, param: str) -> None:
    """Raise Rejection if reading a schema would take long or a deep stack. param: of the request."""
    patterns, references, named = 0, set[str](), False
    for count, (way, keyword, value) in enumerate(_keywords({"": schema}, "")):
        way = way.removeprefix('[""]')
        if isinstance(value, dict) and not _counts(value):
            said = "can be at most one more than the number of required keys: a key could come twice"
            raise _unsupported(f"{param}{way}.minProperties", said)
        if count >= MAX_KEYS:
            raise _unsupported(param, f"has more than {MAX_KEYS} keys")
        if (isinstance(value, dict) or (isinstance(value, list) and keyword in _LISTS)) and len(value) > MAX_PARTS:
            raise _unsupported(f"{param}{way}", f"has {len(value)} parts, at most {MAX_PARTS} are possible")
        if keyword in _BOUNDS and isinstance(value, int | float) and not _is_kept(keyword, value):
            raise _unsupported(f"{param}{way}", "must be from -2^62 to 2^62 and exact as a 64-bit float")
        if isinstance(value, dict) and keyword == "patternProperties":
            patterns += sum(map(len, value))
        elif isinstance(value, str) and keyword == "pattern":
            patterns += len(value)
        elif isinstance(value, str) and keyword == "$ref":
            references.add(value)
        elif isinstance(value, str) and keyword in ("$id", "id"):
            named = True  # references may begin there
        if patterns > MAX_PATTERN_CHARS:
            said = f"has patterns of more than {MAX_PATTERN_CHARS} characters up to here"
            raise _unsupported(f"{param}{way}", said)
    _check_levels(schema, references, named, param)


def _check_levels(schema: Any, references: Collection[str], named: bool, param: str) -> None:
    """Raise Rejection if a schema nests too deeply. named: parts of it have an $id that references may use."""
    whole = levels = _levels(schema)
    counted = {id(schema)}
    for reference in references:
        target = None if named else resolve(schema, reference)
        if target is None:
            levels += whole
        elif id(target) not in counted:
            counted.add(id(target))
            levels += _levels(target)
        if levels > MAX_LEVELS:
            said = f"has more than {MAX_LEVELS} levels, with those of what it refers to"
            raise _unsupported(param, said)


def _keywords(value: Any, way: str) -> Iterator[tuple[str, str, Any]]:
    """Yield every key of a schema, in order: (its path, the key, its value)."""
    if isinstance(value, dict):
        for key, inner in value.items():
            mine = way + step(key)
            yield mine, key, inner
            yield from _keywords(inner, mine)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _keywords(inner, f"{way}[{i}]")


def _unsupported(param: str, why: str) -> Rejection:
    return Rejection(f"{param} {why}", code="unsupported_schema", param=param)


def _is_kept(keyword: str, bound: float) -> bool:
    """Return True if llguidance reads a bound as exactly this number."""
    return (LEAST <= bound <= MOST and float(bound) == bound) or (keyword == "maximum" and bound == MAXIMUM)


def _counts(schema: dict[str, Any]) -> bool:
    """Return True if `minProperties` is at most one more than the number of required properties."""
    least, required = schema.get("minProperties"), schema.get("required")
    return not isinstance(least, int) or least <= 1 + (len({*map(str, required)}) if isinstance(required, list) else 0)


def _levels(value: Any) -> int:
    """Count how deep objects and lists are nested."""
    levels, inner = 0, [value]
    while inner := [one for one in inner if isinstance(one, dict | list)]:
        levels += 1
        inner = [one for many in inner for one in (many.values() if isinstance(many, dict) else many)]
    return levels


def check_lark(text: str, param: str) -> None:
    """Raise Rejection if reading a grammar would take long or a deep stack. param: of the request."""
    if len(text.encode()) > MAX_LARK_BYTES or len(_RULE.findall(text)) > MAX_RULES:
        raise _wrong(param, f"is too large: {MAX_LARK_BYTES} bytes and {MAX_RULES} rules are possible in Lark")
    for found in _SCHEMA.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise _wrong(param, "has a schema (%json) that is not JSON") from None
        check_size(schema, param)


def held(text: str) -> str:
    """Return the grammar, with forcing turned off if a forced part of an answer might have no end.

    llguidance computes forced bytes in a loop without a bound, so an endless part would block the process.
    """
    return text + _ONE_BY_ONE if _ENDLESS.search(text) else text


def _wrong(param: str, why: str) -> Rejection:
    return Rejection(f"{param} {why}", code="invalid_value", param=param)
