"""Malformed calls: arguments are always a JSON object, no marker is ever content, and the pieces do not matter."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pydantic_core import from_json
from reading import Read, read

from ssmd.text.answer import AnswerReader
from ssmd.text.calls.formats import FORMATS, LFM2, Format
from ssmd.text.calls.parts import CallArguments, CallEnd

CASES = json.loads((Path(__file__).parents[1] / "data" / "calls.json").read_text("utf-8"))
BY_NAME = {format_.name: format_ for format_ in FORMATS}
AROUND = {  # a call in each format, around its arguments
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "qwen 3.5": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "nemotron": '<TOOLCALL>[{{"name": "f", "arguments": {}}}]</TOOLCALL>',
    "granite 3": '<|tool_call|>[{{"name": "f", "arguments": {}}}]',
    "lfm2": '<|tool_call_start|>[{{"name": "f", "arguments": {}}}]<|tool_call_end|>',
    "llama 3": '{{"name": "f", "parameters": {}}}',
    "mistral": '[TOOL_CALLS] [{{"name": "f", "arguments": {}}}]',
    "mistral 11": "[TOOL_CALLS]f[ARGS]{}",
}
ANSWERS: list[tuple[Format, str, str, list[list[Any]]]] = [
    *(
        (BY_NAME[name], around.format(text), "", [["f", arguments]])
        for text, arguments in CASES["arguments"]
        for name, around in AROUND.items()
        if name == "hermes" or (text[0] == "{" and name != "qwen 3.5")
    ),
    *(
        (LFM2, f"<|tool_call_start|>[f({text})]<|tool_call_end|>", "", [["f", arguments]])
        for text, arguments in CASES["python"]
    ),
    *((BY_NAME[one["format"]], one["text"], one["content"], one["calls"]) for one in CASES["answers"]),
]


def check(format_: Format, found: Read) -> None:
    """Check the promise: arguments parse, also strictly, and the content has no marker."""
    for _, arguments, whole in found.calls:
        assert whole
        assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)
        assert isinstance(from_json(arguments), dict)
        arguments.encode()
    markers = (*format_.openings, *format_.closings)
    assert not any(marker in found.said for marker in markers), found.said


@pytest.mark.parametrize("i", range(len(ANSWERS)), ids=lambda i: f"{ANSWERS[i][0].name}-{ANSWERS[i][1][:60]!r}")
def test_a_malformed_call_is_read_wherever_it_is_cut(i: int) -> None:
    format_, text, content, calls = ANSWERS[i]
    whole = read(format_, [text])
    assert (whole.said, [[name, json.loads(arguments)] for name, arguments, _ in whole.calls]) == (content, calls)
    assert whole.content == whole.said
    check(format_, whole)
    for cut in range(1, len(text)):
        assert read(format_, [text[:cut], text[cut:]]) == whole, cut
    assert read(format_, text) == whole


@pytest.mark.parametrize("format_", FORMATS, ids=lambda one: one.name)
def test_two_cuts_do_not_matter(format_: Format) -> None:
    shortest = sorted((text for one, text, _, calls in ANSWERS if one is format_ and calls), key=len)
    for text in shortest[:3]:
        whole = read(format_, [text])
        for b in range(2, len(text)):
            for a in range(1, b):
                assert read(format_, [text[:a], text[a:b], text[b:]]) == whole, (a, b)


def mutated(draw: random.Random, text: str) -> str:
    """Return a text with some characters deleted, doubled, replaced or swapped, or with pieces of others put in."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            text = text[:at] + text[at + draw.randint(1, 4) :]
        elif kind == 1:
            text = text[:at] + draw.choice(HOSTILE) + text[at:]
        elif kind == 2:
            text = text[:at] + text[at : at + draw.randint(1, 12)] + text[at:]
        elif kind == 3:
            text = text[:at] + draw.choice(HOSTILE) + text[at + 1 :]
        else:
            other = draw.choice(ANSWERS)[1]
            b = draw.randrange(len(other) + 1)
            text = text[:at] + other[b : b + draw.randint(1, 20)] + text[at:]
    return text


HOSTILE = (
    *"{}[]()\"'\\,:;=#/*<>|\n\t\r\0 -+._%~x0u",
    *("'''", '"""', "\\u", "\\ud83d", "\\x4", "f'", "0x", "//", "/*", "*/", "NaN", "é", "\u2028", "\ud800", "<tool_"),
    *('"name"', '"arguments"', '"f"', "f(", "a=", "<think>", "</think>"),
    *(marker for format_ in FORMATS for marker in (*format_.markers, *format_.closings)),
)


@pytest.mark.parametrize("format_", FORMATS, ids=lambda one: one.name)
def test_the_promise_holds_for_mutated_calls(format_: Format) -> None:
    draw = random.Random(format_.name)
    texts = [text for one, text, _, _ in ANSWERS if one is format_]
    for _ in range(10_000 // len(FORMATS) + 1):
        text = mutated(draw, draw.choice(texts))
        whole = read(format_, [text])
        check(format_, whole)
        a, b = sorted((draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)))
        assert read(format_, [text[:a], text[a:b], text[b:]]) == whole, (text, a, b)


@pytest.mark.parametrize("format_", FORMATS, ids=lambda one: one.name)
def test_an_answer_that_is_cut_leaves_its_beginning(format_: Format) -> None:
    """With max_tokens or a stop string, arguments stay as far as they came, and are not complete."""
    text = AROUND[format_.name].format('{"a": [1, "x\\ny"], "b": {"c": true}}')
    [(_, arguments, _)] = read(format_, [text]).calls
    for cut in range(len(text)):
        found = read(format_, [text[:cut]], cut=True)
        for _, given, whole in found.calls:
            assert arguments.startswith(given)
            assert whole is False or given == arguments


def test_numbers_and_nesting_no_parser_reads_are_strings() -> None:
    digits, deep = "9" * 5000, "[" * 200 + '"\\n"' + "]" * 200
    text = AROUND["hermes"].format(f'{{"a": {digits}, "b": {deep}, "c": 1}}')
    found = read(BY_NAME["hermes"], text)
    check(BY_NAME["hermes"], found)
    arguments = json.loads(found.calls[0][1])
    value, levels = arguments["b"], 0
    while isinstance(value, list):
        [value], levels = value, levels + 1
    assert (arguments["a"], arguments["c"], "[" * levels + value + "]" * levels) == (digits, 1, deep)


@pytest.mark.parametrize("format_", FORMATS, ids=lambda one: one.name)
def test_a_string_is_sent_as_it_comes(format_: Format) -> None:
    before, behind = AROUND[format_.name].format('{"city": "Par\0is"}').split("\0")
    reader, found = AnswerReader(format_, {"f": {}}), Read()
    found.take(reader.push(before))
    found.take([CallEnd(False)])
    assert found.calls == [("f", '{"city": "Par', False)]
    assert "".join(part.text for part in reader.push(behind[:2]) if isinstance(part, CallArguments)) == "is"


def pieces(text: str, n: int) -> list[str]:
    return [text[i : i + n] for i in range(0, len(text), n)]


def work(format_: Format, text: str) -> int:
    """Count the calls of functions, also of those in C, that reading a text in small pieces takes."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event.endswith("call")

    sys.setprofile(note)
    try:
        read(format_, pieces(text, 3))
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["hermes", "lfm2", "mistral 11"])
def test_work_grows_as_the_text_does(name: str) -> None:
    call = "<|tool_call_start|>[f(a=" if name == "lfm2" else AROUND[name].split("{}")[0].replace("{{", "{")
    for opened in ("", '{"a": ', '{"a": "'):
        for hostile in (*"{[}\"'(\\: \n</", '"{', '":', "}]", "a ", "1", '" ', "\\ud83d", AROUND[name][:16]):
            few, many = (work(BY_NAME[name], call + opened + hostile * (n // len(hostile))) for n in (100, 400))
            assert many < 6 * few, (opened, hostile)
