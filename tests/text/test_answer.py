"""An answer told apart as it comes: however it is cut the same, nothing twice, nothing lost, and in linear time."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reading import read, without_markers
from text.test_call_formats import EXAMPLES

from ssmd.text.calls.formats import FORMATS, HERMES, LFM2, LLAMA_3, Format
from ssmd.text.calls.value import MAX_DEPTH

# fmt: off
PIECES = (
    *(marker for format_ in FORMATS for marker in format_.markers), "<think>", "</think>", "<tool_", "call>", "</",
    '{"name": "f", "arguments": {', '{"name": "f", "parameters": {"a": 1}}', '"name": ', '"arguments": ', '"a": 1', "f",
    "{", "}", "[", "]", "(", ")", "[f(", "a=", "'", '"', "\\", "\\u00e9", ",", ";", ":", " ", "\n", "\n\n", "True",
    "-1.5", "<|", "é", "👍", "Yes.",
)
# fmt: on
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=14).map("".join)
formats = st.sampled_from([*FORMATS, None])


def words(format_: Format | None, text: str) -> str:
    """Return a text without markers and spaces, which a marker may take along."""
    text = "".join(without_markers(format_, text).split())
    return text.replace("[ARGS]", "").replace("[CALL_ID]", "")


@settings(deadline=None)
@given(formats, texts, st.booleans(), st.data())
@example(HERMES, '<think>\n\n</think>\n\n<tool_call>{"name": "f", "arguments": {}}', False, None)
def test_the_pieces_do_not_matter(
    format_: Format | None, text: str, thinking: bool, data: st.DataObject | None
) -> None:
    cuts = [] if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    at = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(at)]
    whole = read(format_, [text], thinking=thinking)
    assert read(format_, pieces, thinking=thinking) == whole
    assert read(format_, text, thinking=thinking) == whole


@settings(deadline=None)
@given(st.sampled_from(sorted(EXAMPLES)), texts, st.data())
def test_nor_where_a_call_is_damaged(name: str, more: str, data: st.DataObject) -> None:
    format_, text, _, _ = EXAMPLES[name]
    a, b = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 3))
    damaged = text[:a] + more + text[a + b :]
    cut = data.draw(st.integers(0, len(damaged)))
    whole = read(format_, [damaged])
    assert read(format_, [damaged[:cut], damaged[cut:]]) == whole
    assert read(format_, damaged) == whole
    if not whole.calls and not whole.thought:
        assert words(format_, whole.said) == words(format_, whole.content) == words(format_, damaged)


@pytest.mark.parametrize("format_", [one for one in FORMATS if one.closing], ids=lambda one: one.name)
def test_a_part_of_the_last_marker_is_none_of_the_content(format_: Format) -> None:
    written = format_.written
    call = f"{written.opening}{written.before}f{written.middle}{{}}{written.after}{written.closing}"
    for cut in range(len(format_.closing)):
        found = read(format_, [call[: len(call) - len(format_.closing) + cut]])
        assert (found.said, found.calls) == ("", [("f", "{}", True)])


@settings(deadline=None)
@given(formats, texts)
def test_a_text_without_calls_is_as_it_was_but_markers(format_: Format | None, text: str) -> None:
    found = read(format_, text)
    if not found.calls:
        assert words(format_, found.content) == words(format_, text)
        if not found.thought and "<think>" not in text[: len(text) - len(text.lstrip()) + 7]:
            assert words(format_, found.said) == words(format_, text)
            assert format_ is not None or found.said == text


@settings(deadline=None)
@given(texts, texts)
def test_reasoning_is_told_from_what_is_said(thought: str, said: str) -> None:
    text = f"<think>\n{thought}\n</think>\n\n{said}"
    found = read(None, text)
    assert found.content == text
    if "</think>" not in thought:
        assert (found.thought, found.said) == (thought.strip(), said.lstrip())
    opened = read(None, text.removeprefix("<think>"), thinking=True)
    if not thought.strip().startswith("<think>"):
        assert (opened.thought, opened.said) == (found.thought, found.said)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
objects = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), json_values, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(objects, min_size=1, max_size=3), st.booleans())
def test_arguments_come_as_they_were_written(given: list[dict[str, object]], ascii_: bool) -> None:
    written = [json.dumps(one, ensure_ascii=ascii_) for one in given]
    text = "\n".join(f'<tool_call>\n{{"name": "f", "arguments": {one}}}\n</tool_call>' for one in written)
    found = read(HERMES, text)
    assert (found.calls, found.said) == ([("f", one, True) for one in written], "")


@settings(max_examples=40, deadline=None)
@given(st.lists(objects, min_size=1, max_size=3))
def test_python_is_read_as_python_writes_it(given: list[dict[str, object]]) -> None:
    calls = ", ".join(f"f({', '.join(f'{name}={value!r}' for name, value in one.items())})" for one in given)
    found = read(LFM2, f"<|tool_call_start|>[{calls}]<|tool_call_end|>")
    assert [json.loads(arguments) for _, arguments, _ in found.calls] == given
    assert found.said == ""


def seconds(format_: Format, text: str, n: int = 4) -> float:
    started = time.process_time()
    read(format_, [text[i : i + n] for i in range(0, len(text), n)])
    return time.process_time() - started


@pytest.mark.parametrize(
    "of",
    [
        lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 8 * n + '"}}</tool_call>',
        lambda n: '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 8 * n,
        lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + '\\"}{' * 2 * n + '"}}</tool_call>',
        lambda n: '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n' * (n // 6),
        lambda n: '<tool_call>{"x": [' * (n // 2),
        lambda n: '<tool_call>{"x": [' * (n // 2) + "}",
        lambda n: "<tool_call>" * n,
        lambda n: " " * 8 * n,
        lambda n: "<think>" + "\n" * 8 * n,
        lambda n: "<" * 8 * n,
    ],
)
def test_time_is_linear(of: object) -> None:
    assert callable(of)
    small, large = of(2_000), of(16_000)
    assert seconds(HERMES, large) < 30 * max(seconds(HERMES, small), 0.01)


def test_a_million_characters_and_two_thousand_calls() -> None:
    long = json.dumps({"a": "y" * 1_000_000})
    assert read(HERMES, [f'<tool_call>{{"name": "f", "arguments": {long}}}</tool_call>']).calls == [("f", long, True)]
    many = "[" + ", ".join(["f(a=1)"] * 2000) + "]"
    assert read(LFM2, ["<|tool_call_start|>", many]).calls == [("f", '{"a": 1}', True)] * 2000
    deep = "[" * 100_000 + "]" * 100_000
    [(_, arguments, whole)] = read(LLAMA_3, ['{"name": "f", "parameters": {"a": ' + deep + "}}"]).calls
    value = json.loads(arguments)["a"]
    for _ in range(MAX_DEPTH - 1):
        [value] = value
    assert (value, whole) == (deep[MAX_DEPTH - 1 : 1 - MAX_DEPTH], True)
