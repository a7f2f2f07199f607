"""The notations of calls: which one a template tells of, published examples of each, and what is no call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reading import read, without_markers

from ssmd.text.calls.formats import (
    FORMATS,
    GRANITE_3,
    HERMES,
    LFM2,
    LLAMA_3,
    MISTRAL,
    MISTRAL_11,
    NEMOTRON,
    QWEN_3_5,
    Format,
    format_of,
)

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
# Of each published template the lines that tell what its model was trained to write.
PUBLISHED = {
    "Qwen3": (HERMES, """{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""),
    "Qwen3.5": (QWEN_3_5, """{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"""),
    "Qwen3-Coder": (QWEN_3_5, """{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"""),
    "Nemotron 3 Nano": (QWEN_3_5, """{{- '<tool_call>\\n<function=' ~ tool_call.name ~ '>\\n' -}}"""),
    "a real line break": (QWEN_3_5, "<tool_call>\n<function={{ tool_call.name }}>"),
    "Qwen2.5": (HERMES, '{{- \'\\n<tool_call>\\n{"name": "\' }}'),
    "Hermes 3": (HERMES, '<tool_call>\\n{"name": <function-name>, "arguments": <args-dict>}\\n</tool_call>'),
    "Granite 4": (HERMES, """{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}"""),
    "Granite 3.0": (GRANITE_3, "{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}"),
    "Granite 3.3": (GRANITE_3, "respond only with <|tool_call|> followed by a JSON list of tools used."),
    "LFM2": (LFM2, 'ns.system_prompt + "List of tools: <|tool_list_start|>["'),
    "LFM2.5": (LFM2, """{{- "<|tool_call_start|>[" + (calls | join(", ")) + "]<|tool_call_end|>" -}}"""),
    "Llama 3.1": (LLAMA_3, """{{- "<|python_tag|>" + tool_call.name + ".call(" }} {{- '"parameters": ' }}"""),
    "Llama 3.2": (LLAMA_3, """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""),
    "Mistral 7B 0.3": (MISTRAL, '{{- "[TOOL_CALLS] [" }}'),
    "Mistral Small 3.2": (MISTRAL_11, '{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}'),
    "Nemotron Nano 2": (NEMOTRON, """{{- '<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}, ' -}}"""),
    "none": (HERMES, "{{ message['content'] }}"),
}
PARIS = ("get_weather", {"city": "Paris, FR"})
BOTH = [PARIS, ("f", {"a": [1, -2.5e3, True, None, {}], "b": "x"})]
EXAMPLES: dict[str, tuple[Format, str, str, list[tuple[str, object]]]] = {
    "qwen3": (
        HERMES,
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, FR"}}\n</tool_call>',
        "Let me look.",
        [PARIS],
    ),
    "qwen3, two": (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, FR"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, -2.5e3, true, null, {}], "b": "x"}}\n</tool_call>',
        "",
        BOTH,
    ),
    "falcon-h1": (
        HERMES,
        '\n<tool_call>\n{"arguments": {"city": "Paris, FR"}, "name": "get_weather"}\n</tool_call>',
        "",
        [PARIS],
    ),
    "no closing marker": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris, FR"}}',
        "",
        [PARIS],
    ),
    "text behind": (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nSo.', "\nSo.", [("f", {})]),
    "no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    "null arguments": (HERMES, '<tool_call>{"arguments": null, "name": "f"}</tool_call>', "", [("f", {})]),
    "a list": (HERMES, '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [("f", {}), ("g", {})]),
    "arguments as text": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris, FR\\"}"}</tool_call>',
        "",
        [PARIS],
    ),
    "more fields": (
        HERMES,
        '<tool_call>{"id": 7, "name": "f", "type": {"a": ["}"]}, "arguments": {"x": 1}, "more": -1}</tool_call>',
        "",
        [("f", {"x": 1})],
    ),
    "qwen3.5": (
        QWEN_3_5,
        "Let me look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis, FR\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "Let me look.",
        [PARIS, ("f", {})],
    ),
    "granite 3": (
        GRANITE_3,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris, FR"}}]',
        "",
        [PARIS],
    ),
    "lfm2": (
        LFM2,
        'Checking.<|tool_call_start|>[get_weather(city="Paris, FR"), '
        "f(a=[1, -2.5e3, True, None, {}], b='x')]<|tool_call_end|>Done.",
        "Checking.Done.",
        BOTH,
    ),
    "lfm2, no arguments": (LFM2, "<|tool_call_start|>[f()]<|tool_call_end|>", "", [("f", {})]),
    "lfm2, escapes": (
        LFM2,
        r"""<|tool_call_start|>[f(a='it\'s "so"\n\x41\u00e9\ud83d\udc4d\U0001f44d\d', b=(1, +2, .5,), c={'k': 'v',})]"""
        "<|tool_call_end|>",
        "",
        [("f", {"a": 'it\'s "so"\nAé👍👍\\d', "b": [1, 2, 0.5], "c": {"k": "v"}})],
    ),
    "lfm2, as JSON": (
        LFM2,
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris, FR"}}]<|tool_call_end|>',
        "",
        [PARIS],
    ),
    "llama 3.2": (LLAMA_3, '{"name": "get_weather", "parameters": {"city": "Paris, FR"}}', "", [PARIS]),
    "llama 3.1": (LLAMA_3, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris, FR"}}', "", [PARIS]),
    "llama, two": (
        LLAMA_3,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "",
        [("f", {}), ("g", {})],
    ),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris, FR"}, "id": "9Ae3bDc2F"}]',
        "",
        [PARIS],
    ),
    "mistral 11": (MISTRAL, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris, FR"}', "", [PARIS]),
    "mistral 11, two, one with an id": (
        MISTRAL,
        'On it.[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Paris, FR"}',
        "On it.",
        [("f", {}), PARIS],
    ),
    "nemotron": (NEMOTRON, '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>', "", [("f", {})]),
    "a marker in a string": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>{\\"}]"}}</tool_call>',
        "",
        [("f", {"a": '</tool_call><tool_call>{"}]'})],
    ),
    "a tool that nobody named": (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "", [("rm", {})]),
    "second time lucky": (
        HERMES,
        'Write <tool_call> so: <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "Write  so:",
        [("f", {})],
    ),
}
NO_CALLS = [
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call></tool_call>"),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call> and so on'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
    (HERMES, '  <tool_call> {"name": "f'),
    (HERMES, "[]<tool_cal"),
    (LFM2, "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[f"),
    (LFM2, "<|tool_call_start|>[]<|tool_call_end|>"),
    (LLAMA_3, '{"name": "Ann", "parameters": {"age": 3}}'),
    (LLAMA_3, ' {"city": "Paris"}'),
    (LLAMA_3, 'It is {"name": "f", "parameters": {}}'),
    (LLAMA_3, '<|python_tag|>brave_search.call(query="x")'),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS][]"),
    (MISTRAL, "[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}"),
    (GRANITE_3, "<|tool_call|>none"),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_template_tells_its_format(name: str) -> None:
    format_, line = PUBLISHED[name]
    assert format_of("{%- for message in messages %}" + line) is format_


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("qwen3", HERMES),
        ("qwen3.5", QWEN_3_5),
        ("granite4", HERMES),
        ("falcon-h1", HERMES),
        ("lfm2", LFM2),
        ("smollm2", HERMES),
    ],
)
def test_a_whole_template_tells_its_format(name: str, format_: Format) -> None:
    assert format_of((TEMPLATES / f"{name}.jinja").read_text("utf-8")) is format_


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000])
def test_calls_are_read(name: str, n: int) -> None:
    format_, text, said, calls = EXAMPLES[name]
    found = read(format_, [text[i : i + n] for i in range(0, len(text), n)])
    assert (found.said, found.content, found.thought) == (said, said, "")
    assert [(name, json.loads(arguments)) for name, arguments, _ in found.calls] == calls
    assert all(whole for _, _, whole in found.calls)


@pytest.mark.parametrize(("format_", "text"), NO_CALLS, ids=lambda v: v.name if isinstance(v, Format) else v[:40])
@pytest.mark.parametrize("n", [1, 3, 1000])
def test_what_is_no_call_is_text_without_its_markers(format_: Format, text: str, n: int) -> None:
    found = read(format_, [text[i : i + n] for i in range(0, len(text), n)])
    said = without_markers(format_, text)
    assert (found.said, found.content, found.calls) == (said, said, [])


@pytest.mark.parametrize(
    ("format_", "text", "arguments", "rest"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', '{"a": [1]}', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1} oh', '{"a": 1}', "oh"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b"}', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}, "b": 1 x', "{}", ""),
        (LFM2, "<|tool_call_start|>[f(a=1, 2)]<|tool_call_end|>", '{"a": 1}', ""),
        (LFM2, "<|tool_call_start|>[f(a=[1, 'b", '{"a": [1, "b"]}', ""),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1', '{"a": 1}', ""),
    ],
)
def test_a_call_that_breaks_is_completed(format_: Format, text: str, arguments: str, rest: str) -> None:
    found = read(format_, text)
    assert (found.calls, found.said) == ([("f", arguments, True)], rest)


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f.name)
def test_markers_that_are_control_tokens_count_as_tokens_alone(format_: Format) -> None:
    """A client that makes the model repeat their text makes no call."""
    call = (
        '[{"name": "f", "arguments": {"a": 1}}]' if format_ is not LLAMA_3 else '{"name": "f", "parameters": {"a": 1}}'
    )
    opening, closing = format_.openings[0], [format_.closing] if format_.closing else []
    found = read(format_, ["So: ", opening, *call, *closing], controls=format_.markers)
    assert ([call[:2] for call in found.calls], found.said) == ([("f", '{"a": 1}')], "So:")
    spelt = f"So: {opening}{call}{''.join(closing)}"
    found = read(format_, spelt, controls=format_.markers)
    assert (found.calls, found.said) == ([], spelt)


def test_a_control_token_where_none_may_stand_ends_the_call() -> None:
    found = read(LFM2, ["<|tool_call_start|>", "[f(a='x", "<|tool_call_end|>", " So."], controls=LFM2.markers)
    assert (found.calls, found.said) == ([("f", '{"a": "x"}', True)], " So.")
    found = read(LFM2, ["<|tool_call_start|>", "[f", "<|tool_call_start|>", "[g()]"], controls=LFM2.markers)
    assert (found.calls, found.said) == ([("g", "{}", True)], "[f")


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f.name)
def test_ids_are_what_clients_and_templates_know(format_: Format) -> None:
    new = {format_.new_id() for _ in range(50)}
    assert len(new) == 50
    for id_ in new:
        plain = id_.removeprefix("call_")
        assert plain.isascii()
        assert plain.isalnum()
        assert len(plain) == (9 if format_ in (MISTRAL, MISTRAL_11) else 24)
