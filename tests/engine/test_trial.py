"""Grammars that are tried in a child process first: the costly ones are refused, honest ones of any size are not."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import vocabularies
from daemon import soon

from ssmd.api.openai.fields import of_choice, of_grammar, of_regex, of_schema
from ssmd.engine.host.host import KEEP_ALIVE_S
from ssmd.engine.sampling import kept, trial
from ssmd.engine.sampling.grammar import Grammars
from ssmd.engine.sampling.trial import PendingTrial, Trials, Verdict, is_plain
from ssmd.engine.terms import Grammar, Rejection
from ssmd.machine.child import AT_ONCE_S, Child, KilledChild, Packet

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing limits memory")
NAME = "byte-level"


@pytest.fixture
def read() -> Iterator[Grammars]:
    tokenizer = vocabularies.opened(NAME)
    grammars = Grammars(tokenizer, [vocabularies.id_of(NAME, "<|im_end|>")], tokenizer.vocabulary)
    yield grammars
    grammars.close()


schema = partial(of_schema, param="json_schema")


def numbers(count: int, first: int, step: int = 0) -> dict[str, Any]:
    """Return an object whose integers are multiples of so many numbers."""
    return {"type": "object", "properties": {f"p{i}": multiple(first + step * i) for i in range(count)}}


def multiple(of: float) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": of}


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"pattern": text} for text in texts(count)]


def texts(count: int) -> list[str]:
    return [f"(.)*{chr(97 + i)}(.){{{i}}}" for i in range(count)]


BOTH = {"a": {"multipleOf": 10_007}, "b": {"allOf": [{"multipleOf": 10_009}]}}


@pytest.mark.parametrize(
    ("costly", "way"),
    [
        (multiple(3_000_017), ".multipleOf"),
        (multiple(-3_000_017), ".multipleOf"),
        (multiple(2_000_001.5), ".multipleOf"),
        (numbers(100, 100_003, 2), ".properties.p1.multipleOf"),
        (
            {"items": {"type": "integer", "allOf": [{"multipleOf": n} for n in (10_007, 10_009, 10_037)]}},
            ".items.allOf",
        ),
        ({"type": "integer", "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": BOTH}, ".allOf"),
        ({"allOf": [{"anyOf": [multiple(7), multiple(10_007)]}, multiple(10_009)]}, ".allOf"),
        ({"allOf": [multiple(n) for n in range(2**61, 2**61 + 2**15, 2**9)]}, ".allOf"),
        ({"type": "string", "allOf": patterns(20)}, ".allOf"),
        ({"type": "string", "allOf": [{"allOf": patterns(7)}, {"anyOf": [{"allOf": patterns(7)}]}]}, ".allOf"),
    ],
)
def test_too_many_remainders_or_patterns_are_refused(costly: dict[str, Any], way: str, read: Grammars) -> None:
    with pytest.raises(Rejection, match=r"remainders|patterns that apply to one text") as caught:
        read.read(schema(costly))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_schema")
    assert caught.value.param == f"json_schema{way}"
    assert read._trials._child is None


@pytest.mark.parametrize("beyond", [1e300, float("inf"), 10**400, True, "3"])
def test_numbers_beyond_the_bounds_are_counted_as_none(beyond: Any, read: Grammars) -> None:
    for one in ({"multipleOf": beyond}, {"allOf": [{"multipleOf": beyond}] * 9}):
        with pytest.raises(Rejection) as caught:
            read.read(schema(one))
        assert (caught.value.status, caught.value.code) == (400, "unsupported_schema")


@pytest.mark.parametrize("text", ["start: A\nA: " + " & ".join(f"/{one}/" for one in texts(20)), None])
def test_many_intersections_in_lark_are_refused(text: str | None) -> None:
    if text is None:  # in a text, a pattern or a comment it is none
        assert of_grammar('start: A\nA: "' + "&" * 50 + '" | /&{50}' + "&" * 50 + "/ // " + "&" * 50, "grammar")
        return
    with pytest.raises(Rejection, match="19 intersections") as caught:
        of_grammar(text, "grammar")
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")


BESIDE = {"$ref": "#/$defs/a", "multipleOf": 10_009, "$defs": {"a": multiple(10_007)}}
BEHIND = 'start: A\nA: /[^Z]*/ | "ZQXKJW" C\nC: ' + " & ".join(f"/{one}/" for one in texts(12))  # 40 s and more


@linux
@pytest.mark.parametrize("costly", [schema(BESIDE), of_grammar(BEHIND, "grammar")], ids=["schema", "lark"])
def test_a_limit_ends_the_trial_and_not_this_process(costly: Grammar, read: Grammars) -> None:
    before = os.times()
    for _ in range(2):
        with pytest.raises(Rejection, match="it is too costly: reading it takes more than 2 s") as caught:
            read.read(costly)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_schema")
        assert caught.value.param == costly.param
        assert child_of(read) is None, "the verdict is kept"
    assert read.read(of_regex("[ab]{3}", "guided_regex")).goes_on
    spent = os.times()
    assert spent.user + spent.system - before.user - before.system < 1.5


def child_of(grammars: Grammars) -> int | None:
    child = grammars._trials._child
    return None if child is None else child.process_id


KINDS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 200},
    {"type": "integer", "minimum": -5, "maximum": 1_000_000},
    {"enum": ["a", "b", "c"]},
    {"type": "string", "format": "date-time"},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4,10}$"},
    {"type": "array", "items": {"type": "string"}, "maxItems": 50},
    {"anyOf": [{"type": "integer"}, {"type": "string", "format": "uuid"}]},
    {"type": "integer", "multipleOf": 5},
]
WIDE = {"type": "object", "properties": {f"property_{i}": KINDS[i % len(KINDS)] for i in range(100)}}
RULES = [{"pattern": one} for one in ("[A-Z]", "[a-z]", "[0-9]", "[!@#$%]")]


@pytest.mark.parametrize(
    "honest",
    [
        {"type": "object", "properties": {f"part_{i}": WIDE for i in range(10)}},  # 1,000 properties
        {"type": "string", "allOf": [*RULES, {"minLength": 8, "maxLength": 64}]},
        {"type": "number", "multipleOf": 0.01},
        {"type": "number", "multipleOf": 1e-6},
        multiple(100_003),
        numbers(100, 1003),
        {"type": "integer", "allOf": [multiple(1000), multiple(1000)]},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}}}},
    ],
)
def test_honest_schemas_pass_their_trial(honest: dict[str, Any], read: Grammars) -> None:
    assert read.read(schema(honest)).goes_on
    assert child_of(read) is not None


PLAIN = [
    schema({"type": "object"}),
    schema({"type": "object", "properties": {"a": {"type": ["string", "null"]}, "pattern": {"enum": [{"allOf": 1}]}}}),
    schema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "maxLength": 9}], "title": "x"}),
    schema({"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 2}),
    of_choice(['a "quoted" \\one', "ö", "line\nline"], "guided_choice"),
]
NOT_PLAIN = [
    *map(schema, (multiple(2), {"pattern": "a"}, {"allOf": []}, {"$ref": "#/$defs/a", "$defs": {"a": {}}})),
    schema({"items": {"format": "email", "maxLength": 9}}),
    schema({"anyOf": [{"format": "email"}], "minLength": 9}),
    schema({"patternProperties": {"a": True}}),
    schema({"properties": {f"p{i}": {"type": "string"} for i in range(trial.PLAIN_KEYS)}}),
    Grammar('{"grammars": [{"json_schema": {"x-guidance": {"item_separator": "(a|b)?,"}}}]}', "tools"),
    schema({"prefixItems": [True] * trial.PLAIN_KEYS}),
    schema({"enum": [[i] for i in range(trial.PLAIN_KEYS)]}),
    schema({"required": [f"p{i}" for i in range(trial.PLAIN_KEYS)]}),
    of_choice(["x" * trial.PLAIN_CHARS], "guided_choice"),
    of_regex("a", "guided_regex"),
    of_grammar('start: "a"+', "grammar"),
    of_grammar('start: "a" | A\nA: /a/', "grammar"),
    Grammar("start: %json {}", "tools", (schema({"type": "object"}), schema(multiple(2)))),
]


@pytest.mark.parametrize("grammar", PLAIN)
def test_a_plain_grammar_starts_no_process(grammar: Grammar, read: Grammars) -> None:
    assert is_plain(grammar)
    assert read.read(grammar, wait=False).goes_on
    assert read._trials._child is None


@pytest.mark.parametrize("grammar", NOT_PLAIN)
def test_any_other_grammar_is_tried(grammar: Grammar) -> None:
    assert not is_plain(grammar)


@linux
@pytest.mark.parametrize("bad", [BESIDE, {"type": "strin"}])
def test_the_wrong_part_of_a_grammar_is_named(bad: dict[str, Any], read: Grammars) -> None:
    parts = (schema({"type": "object"}), Grammar(schema(bad).text, "tools[1].function.parameters"))
    inner = json.dumps(json.loads(parts[1].text)["grammars"][0]["json_schema"])
    with pytest.raises(Rejection) as caught:
        read.read(Grammar(f'start: "a" | x\nx: %json {inner}', "tools", parts))
    way = ".type" if "type" in bad else ""
    assert (caught.value.code, caught.value.param) == ("unsupported_schema", f"tools[1].function.parameters{way}")


STRING = {"type": "string"}
LISTS = {"type": "array", "minItems": 1}
REMAINDERS = {"type": "integer", "allOf": [multiple(10_007), multiple(19)]}  # 190,133 together, which take 2 s


@linux
@pytest.mark.parametrize(
    ("costly", "way", "why"),
    [
        ({"properties": {"a": STRING, "b": LISTS | {"items": REMAINDERS}}}, ".properties.b.items.allOf", "too costly"),
        (
            {"properties": {"a": STRING | {"allOf": patterns(12)}}, "required": ["a"]},
            ".properties.a",
            "fewer or simpler",
        ),
    ],
)
def test_a_costly_part_of_a_schema_is_named(costly: dict[str, Any], way: str, why: str, read: Grammars) -> None:
    with pytest.raises(Rejection, match=why) as caught:
        read.read(schema(costly))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_schema")
    assert caught.value.param == f"json_schema{way}"
    assert "Regex" not in caught.value.message


def test_the_errors_of_a_trial_are_llguidances_own(read: Grammars) -> None:
    for text, why in (("start: nowhere", "nowhere"), ('start: "a" start', "no answer is possible")):
        with pytest.raises(Rejection, match=why) as caught:
            read.read(of_grammar(text, "grammar"))
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", "grammar")


def test_masks_that_take_long_are_an_error(read: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    work = trial._Work(read._opening())
    text = of_regex("[a-z]{3,9}", "guided_regex").text
    assert {**work.do([text]).head, "bytes": 0} == {"why": "", "part": None, "slow": False, "bytes": 0}
    monkeypatch.setattr(trial, "MASK_S", 0.0)
    assert work.do([text]).head["slow"]


def test_a_process_killed_between_trials_is_started_again(read: Grammars) -> None:
    assert read.read(of_regex("a{2}", "guided_regex")).goes_on
    number = child_of(read)
    assert number is not None
    os.kill(number, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    assert read.read(of_regex("a{3}", "guided_regex")).goes_on
    assert child_of(read) not in (None, number)


@pytest.mark.skipif(sys.platform == "win32", reason="stops and kills a process by signals")
def test_a_process_killed_in_a_trial_tries_it_again(read: Grammars) -> None:
    assert read.read(of_regex("a{2}", "guided_regex")).goes_on
    number = child_of(read)
    assert number is not None
    with ThreadPoolExecutor(1) as thread:
        os.kill(number, signal.SIGSTOP)
        trying = thread.submit(read.read, of_regex("a{3}", "guided_regex"))
        time.sleep(3 * AT_ONCE_S)  # the job counts as begun then
        os.kill(number, signal.SIGKILL)
        assert trying.result(30).goes_on


def test_a_trial_that_is_killed_twice_has_no_verdict(read: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> Packet:
        raise KilledChild("SIGKILL")

    with monkeypatch.context() as patch:
        patch.setattr(Child, "ask", killed)
        with pytest.raises(Rejection, match="was killed") as caught:
            read.read(of_regex("a{4}", "guided_regex"))
        assert (caught.value.status, caught.value.code) == (503, "grammar_check_unavailable")
    assert read.read(of_regex("a{4}", "guided_regex")).goes_on


def test_without_a_process_only_plain_grammars_are_read(
    read: Grammars, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", os.devnull)
        for _ in range(2):
            with pytest.raises(Rejection, match="could not start the process") as caught:
                read.read(of_regex("a{2}", "guided_regex"))
            assert (caught.value.status, caught.value.code) == (503, "grammar_check_unavailable")
        [record] = caplog.records
        assert "no process could be started for it" in record.getMessage()
        assert read.read(PLAIN[0]).goes_on
    assert read.read(of_regex("a{2}", "guided_regex")).goes_on


def regex(number: int) -> list[str]:
    return [of_regex(f"[ab]{{{number}}}", "guided_regex").text]


def test_clients_take_turns_and_one_has_few_trials(read: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MOST_WAITING", 6)
    trials, order = read._trials, list[str]()

    def noted(name: str) -> Callable[[Future[Verdict]], None]:
        return lambda _: order.append(name)

    trials.verdict(regex(1), "a")
    soon(lambda: not trials._waiting)
    waiting = [trials.verdict(regex(2 + i), "a") for i in range(6)]
    with pytest.raises(Rejection, match="grammars of this client wait to be checked") as caught:
        trials.verdict(regex(99), "a")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5)
    other = trials.verdict(regex(50), "b")
    for name, future in (("a", waiting[-1]), ("b", other)):
        future.add_done_callback(noted(name))
    waiting[3].cancel()  # its client left
    again = trials.verdict(regex(5), "b")  # of another client, with the same grammar
    waiting[2].cancel()
    assert [one.result(30) for one in (waiting[-1], other)] == [Verdict(), Verdict()]
    assert order == ["b", "a"]
    assert again.result(0) == Verdict()
    assert not trials.verdict(regex(4), "a").done(), "it was dropped, so it has no verdict"


def test_requests_with_one_grammar_share_its_trial(read: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MOST_WAITING", 1)
    first = read._trials.verdict(regex(1), "a")
    soon(lambda: not read._trials._waiting)
    same = [read._trials.verdict(regex(2 - i % 2), "a") for i in range(20)]
    assert len(read._trials._jobs) == 2
    same[0].cancel()
    assert [one.result(30) for one in (first, *same[1:])] == [Verdict()] * 20


def test_a_request_that_does_not_wait_comes_again(read: Grammars) -> None:
    grammar = of_regex("[ab]{2}", "guided_regex")
    with pytest.raises(PendingTrial) as pending:
        read.read(grammar, wait=False)
    assert pending.value.verdict.result(30) == Verdict()
    assert read.read(grammar, wait=False).goes_on


def test_the_process_ends_when_it_has_no_work(read: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "IDLE_S", 0.2)
    assert read.read(of_regex("a{2}", "guided_regex")).goes_on
    soon(lambda: read._trials._child is None and not read._trials._runs)
    assert read.read(of_regex("a{3}", "guided_regex")).goes_on


def test_a_process_without_work_stays_as_long_as_a_model() -> None:
    assert trial.IDLE_S == KEEP_ALIVE_S


@linux
def test_a_verdict_has_the_memory_of_its_grammar(read: Grammars) -> None:
    costly = read._trials.verdict([schema(multiple(40_003)).text], "a").result(60)
    cheap = read._trials.verdict(regex(1), "a").result(60)
    assert costly.nbytes > 10_000_000
    assert cheap.nbytes < 5_000_000


@linux
def test_kept_grammars_are_bounded_by_their_memory(read: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    costly = [schema(multiple(30_001 + i)) for i in range(2)]
    for one in costly:
        read.read(one)
    alone = [guide.memory.nbytes for guide in read._kept._guides.values()]
    assert sum(alone) == read._kept.used <= kept.KEPT_BYTES
    monkeypatch.setattr(kept, "KEPT_BYTES", alone[-1] - 1)
    read.read(PLAIN[0])
    assert [*read._kept._guides] == [PLAIN[0]], "the others went"
    assert read._kept.used == kept.LEAST_BYTES
    read.read(costly[0])
    assert [*read._kept._guides] == costly[:1], "the last one stays, whatever it takes"


def test_grammars_in_use_are_bounded_by_their_memory(read: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 3 * kept.LEAST_BYTES)
    used = [read.read(of_choice([str(i)], "guided_choice")) for i in range(3)]
    with pytest.raises(Rejection, match=r"grammars of other answers take 3\.0 MB of memory") as caught:
        read.read(of_choice(["x"], "guided_choice"))
    refused = caught.value
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "queue_full", kept.RETRY_AFTER_S)
    copies = [read.read(of_choice(["2"], "guided_choice")) for _ in range(5)]
    assert read._kept.used == 3 * kept.LEAST_BYTES, "one grammar of many answers counts once"
    del used[0]
    assert read.read(of_choice(["x"], "guided_choice")).goes_on
    del used, copies
    monkeypatch.setattr(kept, "MOST_BYTES", 0)
    assert read.read(of_choice(["y"], "guided_choice")).goes_on, "one that is alone is read"
    assert read._kept.used == kept.LEAST_BYTES


@linux
def test_the_end_waits_for_no_trial(read: Grammars) -> None:
    running = read._trials.verdict([schema(BESIDE).text], "a")
    waiting = read._trials.verdict(regex(1), "a")
    soon(lambda: len(read._trials._jobs) == 2 and len(read._trials._waiting) == 1)
    read.close()
    for future in (running, waiting):
        with pytest.raises(Rejection) as caught:
            future.result(5)
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
    assert read.read(PLAIN[0]).goes_on
    with pytest.raises(Rejection, match="shutting down"):
        read.read(of_regex("a", "guided_regex"))


def test_verdicts_are_few_and_those_of_limits_end(read: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: Trials = read._trials
    monkeypatch.setattr(trial, "_KEPT", 2)
    for i in (1, 2, 3):
        trials.verdict(regex(i), "").result(30)
    assert len(trials._verdicts) == 2
    assert trials.verdict(regex(3), "").done()
    key = [*trials._verdicts][-1]
    trials._verdicts[key] = trial._MET_A_LIMIT, -1e9
    assert trials.verdict(regex(3), "").result(30) == Verdict()
