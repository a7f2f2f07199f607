"""Trials of grammars: a child process reads a grammar first, where limits end it. Arguments: PARENT MEMORY.

llguidance counts its own work, but not all of it: a remainder by a million, or twenty patterns that all have to match,
take minutes and gigabytes, and a thread cannot be stopped. So a grammar that could be such a one (`is_plain`) is read
here before the daemon reads it, with a tenth of a second of random answers. Its verdict is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ssmd.engine.terms import Grammar, Rejection
from ssmd.machine.child import Child, ChildError, KilledChild, Packet, UnavailableChild, answer_jobs
from ssmd.machine.confinement import allow_memory
from ssmd.machine.memory import resident, trim
from ssmd.machine.size import show_size

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

log = logging.getLogger(__name__)
MODULE = "ssmd.engine.sampling.trial"
# Limits of reading a grammar. The largest honest schemas (500 formats, 1,000 properties) take 0.6 s and 30 MiB.
READ_S = 2.0  # of processor time
READ_BYTES = 64_000_000
GUESSED_BYTES = 16_000_000  # memory of a grammar where the system does not report this process's
MASK_S = 0.25  # most processor time of a mask in the trial; ordinary ones take 0.1 to 7 ms
MAX_FORCED = 5000  # tokens that a grammar may force at an answer's beginning
PLAIN_KEYS = 200  # keys of a plain schema
PLAIN_CHARS = 32 << 10  # characters of a plain grammar
_WALK_S = 0.1  # processor time of the random answers
_WALK_TOKENS = 2000
_MEMORY = 1 << 30  # bytes of address space for the vocabulary and one grammar
_OPEN_S = 15.0  # processor time to import llguidance and build its table of 256,000 tokens
# Time after which a child without work ends, as long as a model stays loaded. It takes 35 MB, and half a second of
# processor time to start again.
IDLE_S = 300.0
_KEPT = 1000  # verdicts
_KEPT_S = 600.0  # time for which a grammar that met a limit is refused without another trial
_NO_PROCESS = "grammar_check_unavailable"  # code of the error
_MOST_WAITING = 64  # grammars of one client that wait
_SAID = 4096  # characters of llguidance's error that are returned
_STRUCTURE = b'"}],:0'  # characters that the random answers prefer: they end strings, objects and lists

# Keywords of JSON Schema whose cost follows from their length. No two of them make an intersection of texts.
_PLAIN = {
    *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "anyOf", "enum", "const"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("format", "title", "description", "default", "examples", "$schema", "$comment", "x-guidance"),
}
_NOTES = {"title", "description", "default", "examples", "$schema", "$comment", "x-guidance"}
_COMPACT = {"whitespace_flexible": False}  # other options of llguidance are patterns
_VALUES = {"enum", "const", "default", "examples", "x-guidance", "required", "type"}  # no schema is in them
_LITERALS = re.compile(r'start: "(?:[^"\\\n]|\\.)*"(?: \| "(?:[^"\\\n]|\\.)*")*')


@dataclass(frozen=True)
class Verdict:
    """The result of a trial. why: llguidance's error, "" for a grammar that passed. part: index of the wrong part."""

    why: str = ""
    part: int | None = None
    unsupported: bool = False  # it met a limit
    nbytes: int = field(default=0, compare=False)  # memory that the grammar takes


class PendingTrial(Exception):
    """A grammar whose verdict is not known yet. The request can be submitted again once `verdict` is done."""

    def __init__(self, verdict: Future[Verdict]) -> None:
        super().__init__("the grammar is on trial")
        self.verdict = verdict


@dataclass(frozen=True)
class _Job:
    texts: tuple[str, ...]  # the grammar, then its parts
    key: bytes
    verdicts: list[Future[Verdict]]  # of each request with this grammar

    def end(self, verdict: Verdict | BaseException) -> None:
        """Give the verdict, or the error, to the requests."""
        for one in self.verdicts:
            if not one.set_running_or_notify_cancel():  # its client left
                continue
            if isinstance(verdict, Verdict):
                one.set_result(verdict)
            else:
                one.set_exception(verdict)


class Trials:
    """Tries grammars for one model. Thread-safe. The child starts with the first trial and ends when it has no work.

    opening: returns the child's first job (`opening_of`). Clients take turns.
    """

    def __init__(self, opening: Callable[[], Packet]) -> None:
        self._opening = opening
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # of each client
        self._jobs: dict[bytes, _Job] = {}  # those that wait, and the one under way
        self._verdicts: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()  # and when; last used last
        self._child: Child | None = None
        self._runs = self._closed = self._warned = False

    def verdict(self, texts: Sequence[str], client: str) -> Future[Verdict]:
        """Return the verdict on a grammar, once it is known. texts: of the grammar, and of its parts.

        The future's result raises Rejection if no trial is possible. Raises Rejection if the client has too many.
        """
        digest = hashlib.sha256()
        for text in texts:
            digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        key, verdict = digest.digest(), Future[Verdict]()
        with self._changed:
            if (known := self._known(key)) is not None:
                verdict.set_result(known)
            elif self._closed:
                verdict.set_exception(_unavailable("the server is shutting down", "shutting_down"))
            elif key in self._jobs:
                self._jobs[key].verdicts.append(verdict)
            else:
                self._put(_Job(tuple(texts), key, [verdict]), client)
        return verdict

    def _put(self, job: _Job, client: str) -> None:
        mine = self._waiting.setdefault(client, deque())
        if len(mine) >= _MOST_WAITING:
            said = f"{len(mine)} grammars of this client wait to be checked. Please try again in 5 seconds."
            raise _unavailable(said, "queue_full")
        mine.append(job)
        self._jobs[job.key] = job
        if not self._runs:
            self._runs = True
            threading.Thread(target=self._run, name="ssmd-trials", daemon=True).start()
        self._changed.notify_all()

    def close(self) -> None:
        """End the child and refuse all trials."""
        with self._changed:
            self._closed = True
            jobs = [job for mine in self._waiting.values() for job in mine]
            self._waiting.clear()
            child = self._child
            self._changed.notify_all()
        if child is not None:
            child.close()
        for job in jobs:
            job.end(_unavailable("the server is shutting down", "shutting_down"))

    def _known(self, key: bytes) -> Verdict | None:
        verdict, at = self._verdicts.get(key, (None, 0.0))
        if verdict is None or (verdict.unsupported and time.monotonic() - at > _KEPT_S):
            return None
        self._verdicts.move_to_end(key)
        return verdict

    # The methods below run in the thread.

    def _run(self) -> None:
        while (job := self._next()) is not None:
            with self._changed:  # so that no request joins a job that is dropped
                if all(one.cancelled() for one in job.verdicts):
                    del self._jobs[job.key]
                    continue
            verdict: Verdict | BaseException
            try:
                verdict = self._tried(job)
            except BaseException as err:  # of any kind: requests wait for it
                verdict = err
            with self._changed:
                del self._jobs[job.key]
                if isinstance(verdict, Verdict):
                    self._verdicts[job.key] = verdict, time.monotonic()
                    while len(self._verdicts) > _KEPT:
                        self._verdicts.popitem(last=False)
            job.end(verdict)

    def _next(self) -> _Job | None:
        """Wait for the next job, in the clients' turn. None: there was none for long, and the child has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, IDLE_S)
            if self._waiting:
                client, mine = self._waiting.popitem(last=False)
                job = mine.popleft()
                if mine:
                    self._waiting[client] = mine  # behind all others
                return job
            self._runs = False
            child, self._child = self._child, None
        if child is not None:
            child.close()
        return None

    def _tried(self, job: _Job) -> Verdict:
        verdict = self._ask(job.texts)
        if verdict.unsupported:  # the first part that meets a limit by itself is the wrong one
            for i, text in enumerate(job.texts[1:]):
                of_part = self._ask((text,))
                if of_part.why:
                    return Verdict(of_part.why, i, unsupported=of_part.unsupported)
        return verdict

    def _ask(self, texts: Sequence[str]) -> Verdict:
        """Have the child read a grammar. Raises Rejection if there is no child."""
        child = self._child
        if child is None:
            child = Child(MODULE, _MEMORY, self._opening(), _OPEN_S)
            with self._changed:
                self._child = child
                if self._closed:
                    child.close()
        job = Packet({"do": "try"}, json.dumps(texts).encode())
        try:
            try:
                answer = child.ask(job, READ_S + 1)
            except KilledChild:  # not by the grammar, whose process has limits of its own
                answer = child.ask(job, READ_S + 1)
        except ChildError as err:
            if self._closed:
                raise _unavailable("the server is shutting down", "shutting_down") from err
            if isinstance(err, UnavailableChild):
                if not self._warned:
                    log.warning("new grammars cannot be checked, so their requests are refused: %s", err)
                self._warned = True
                said = "The grammar cannot be checked, because the server could not start the process for it."
                raise _unavailable(f"{said} Use a JSON schema without patterns, or try again.", _NO_PROCESS) from err
            if isinstance(err, KilledChild):
                log.warning("the process that tries grammars was killed twice: %s", err)
                said = "The grammar cannot be checked, because the process for it was killed. Please try again."
                raise _unavailable(said, _NO_PROCESS) from err
            log.info("a client's grammar met a limit in its trial and is refused")
            log.debug("its process: %s", err)
            return _MET_A_LIMIT
        self._warned = False
        match answer.head:
            case {"why": str(why), "part": int() | None as part, "slow": bool(slow), "bytes": int(nbytes)}:
                return _MET_A_LIMIT if slow else Verdict(why[:_SAID], part, nbytes=max(0, nbytes))
        log.warning("the process that tries grammars returned something else than a verdict")
        return _MET_A_LIMIT


_MET_A_LIMIT = Verdict(
    f"it is too costly: reading it takes more than {READ_S:g} s of processor time or {show_size(READ_BYTES)} of memory,"
    f" or the choice of a next token more than {MASK_S:g} s. Use a simpler one",
    unsupported=True,
)


def _unavailable(message: str, code: str) -> Rejection:
    return Rejection(message, status=503, code=code, retry_after_s=5)


def is_plain(grammar: Grammar) -> bool:
    """Return True if a grammar's cost follows from its length, so that it needs no trial.

    A plain grammar is a list of fixed texts, or a small JSON schema without patterns, references, remainders and
    intersections, or is put together by ssmd from plain parts.
    """
    if len(grammar.text) > PLAIN_CHARS:
        return False
    if grammar.parts:
        return all(map(is_plain, grammar.parts))
    if grammar.text.startswith("{"):
        grammars = json.loads(grammar.text)["grammars"]
        if len(grammars) == 1 and [*grammars[0]] == ["json_schema"]:
            return _is_plain_schema(grammars[0]["json_schema"])
        return False
    return _LITERALS.fullmatch(grammar.text) is not None


def _is_plain_schema(schema: Any) -> bool:
    keys, left = 0, [schema]
    while left:
        one = left.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict) or not one.keys() <= _PLAIN or one.get("x-guidance", _COMPACT) != _COMPACT:
            return False
        lengths = "format" in one and ("minLength" in one or "maxLength" in one)
        if lengths or ("anyOf" in one and not one.keys() <= _NOTES | {"anyOf"}):  # an intersection
            return False
        keys += len(one)
        for keyword, value in one.items():
            if keyword == "properties":
                inner = list(value.values()) if isinstance(value, dict) else [None]
                keys += len(inner)
                left += inner
            elif isinstance(value, dict) and keyword not in _VALUES:
                left.append(value)
            elif isinstance(value, list) and keyword not in _VALUES:
                keys += len(value)
                left += value
            elif keyword == "required" and isinstance(value, list):
                keys += len(value)
            elif keyword == "enum" and isinstance(value, list):
                keys += sum(isinstance(each, dict | list) for each in value)  # 900 of these take 0.4 s
        if keys > PLAIN_KEYS:
            return False
    return True


def opening_of(tokens: Sequence[bytes], special: Sequence[int], stop_tokens: Sequence[int]) -> Packet:
    """Build the child's first job. tokens: the bytes of each, for llguidance. special: ids of control tokens."""
    lengths = array("I", map(len, tokens))
    head = {"do": "open", "tokens": len(tokens), "special": len(special), "stop_tokens": [*stop_tokens]}
    return Packet(head, lengths.tobytes() + array("I", special).tobytes() + b"".join(tokens))


def limits() -> LLParserLimits:
    """Return llguidance's own bounds of time and memory: about 100 ms to read a grammar, some ms for a mask."""
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


def error_of(matcher: LLMatcher) -> str:
    """Return llguidance's error."""
    said: str = matcher.get_error()
    return said.replace("<non-verbose/>", "").strip()[-_SAID:]


class _Tokens:
    """A model's tokens in llguidance's interface, without its tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, opening: Packet) -> None:
        count, special = opening.head["tokens"], opening.head["special"]
        numbers = array("I", opening.body[: 4 * (count + special)])
        self.tokens, at = list[bytes](), 4 * (count + special)
        for length in numbers[:count]:
            self.tokens.append(opening.body[at : at + length])
            at += length
        self.special_token_ids = numbers[count:].tolist()
        self.eos_token_id = opening.head["stop_tokens"][0]
        self.of_byte = {data: token for token, data in enumerate(self.tokens) if len(data) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode a text byte by byte, as far as there are tokens of one byte: there are no shorter ways in a trial."""
        data, ids = text if isinstance(text, bytes) else text.encode(errors="replace"), list[int]()
        for i in range(len(data)):
            token = self.of_byte.get(data[i : i + 1])
            if token is None:
                break
            ids.append(token)
        return ids


class _Work:
    """The vocabulary of the child, and its jobs."""

    def __init__(self, opening: Packet) -> None:
        from llguidance import LLTokenizer

        self._tokens = _Tokens(opening)
        tokens: Any = self._tokens
        stops: Collection[int] = opening.head["stop_tokens"]
        self._known: LLTokenizer = LLTokenizer(tokens, n_vocab=len(self._tokens.tokens), eos_token=[*stops])
        self._stops = frozenset(stops)
        self._single = [*self._tokens.of_byte.values()]
        self._structure = [t for data, t in self._tokens.of_byte.items() if data in _STRUCTURE]

    def do(self, texts: Sequence[str]) -> Packet:
        """Read a grammar. If it has an error, look for the part that has one too."""
        why, slow, nbytes = self._tried(texts[0])
        part = None
        if why and not slow:
            for i, text in enumerate(texts[1:]):
                of_part, slow, _ = self._tried(text)
                if of_part:
                    why, part = of_part, i
                    break
        return Packet({"why": why, "part": part, "slow": slow, "bytes": nbytes})

    def _tried(self, text: str) -> tuple[str, bool, int]:
        """Return a grammar's error, True if its masks take too long, and the bytes that it takes."""
        from llguidance import LLMatcher

        began, before = time.process_time(), resident()
        matcher = LLMatcher(self._known, text, log_level=0, limits=limits())
        if time.process_time() - began > READ_S:
            return "slow", True, 0
        endless = not matcher.is_error() and len(matcher.compute_ff_tokens()) > MAX_FORCED
        if endless or matcher.is_error() or not any(matcher.compute_bitmask()) or matcher.is_error():
            return error_of(matcher) or NO_ANSWER, False, 0
        if self._is_slow(matcher):
            return "slow", True, 0
        after = resident()
        return "", False, GUESSED_BYTES if before is None or after is None else after - before

    def _is_slow(self, start: LLMatcher) -> bool:
        """Follow the grammar at random, from its beginning again at each end. Return True if a mask takes too long."""
        chance = random.Random(0)  # noqa: S311  the same verdict every time
        began, matcher = time.process_time(), start.deep_copy()
        for _ in range(_WALK_TOKENS):
            before = time.process_time()
            bits = matcher.compute_bitmask()
            now = time.process_time()
            if now - before > MASK_S:
                return True
            if now - began > _WALK_S:
                break
            token = self._any(bits, chance)
            if token is not None and token not in self._stops:
                matcher.consume_token(token)
            if token is None or token in self._stops or matcher.is_error() or matcher.is_stopped():
                matcher = start.deep_copy()
        return False

    def _any(self, bits: bytes, chance: random.Random) -> int | None:
        """Draw one of the tokens of a mask: of those with one byte as often as of all."""
        kind = chance.randrange(4)
        for some in (self._structure,) * (kind == 0) + (self._single,) * (kind <= 1):
            if found := [token for token in some if bits[token >> 3] >> (token & 7) & 1]:
                return chance.choice(found)
        at = chance.randrange(len(bits))
        found_at = _SOME.search(bits, at) or _SOME.search(bits)
        if found_at is None:
            return None
        at = found_at.start()
        return chance.choice([8 * at + i for i in range(8) if bits[at] >> i & 1])


NO_ANSWER = "no answer is possible: it would never end, or this model's vocabulary has none"
_SOME = re.compile(rb"[^\0]")


def main() -> None:
    """Answer jobs until the standard input ends."""
    work: _Work | None = None

    def answer(job: Packet) -> Packet:
        nonlocal work
        if work is None:
            work = _Work(job)
            return Packet({})
        trim()
        allow_memory(READ_BYTES)
        return work.do(json.loads(job.body))

    answer_jobs(answer)


if __name__ == "__main__":
    main()
