"""Calls whose arguments stand in tags: their values by the tool's schema, and the same however the text is cut."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import read

from ssmd.model.artifact import SpecialTokens
from ssmd.text.calls.formats import QWEN_3_5
from ssmd.text.messages import Message, ToolCall
from ssmd.text.telling import MessageAdapter
from ssmd.text.template import ChatTemplate, TemplateInput

SOURCE = (Path(__file__).parents[1] / "data" / "templates" / "qwen3.5.jinja").read_text("utf-8")
TEMPLATE = ChatTemplate(SOURCE, SpecialTokens(eos="<|im_end|>"))
NOW = datetime(2026, 11, 28, tzinfo=UTC)
OF_TYPE: dict[str, Any] = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "none": {"type": "null"},
    "object": {"type": "object"},
    "list": {"type": "array"},
    "text or none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "text or whole": {"type": ["string", "integer"]},
    "text or object": {"oneOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]},
    "one of": {"enum": ["1", "two"]},
    "joined": {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]},
    "anything": {},
}
PARAMETERS = {"type": "object", "properties": OF_TYPE, "$defs": {"a": {"type": "object"}}}


def call(*arguments: tuple[str, str], name: str = "f") -> str:
    """The text of a call as the template writes it."""
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


def arguments_of(text: str, parameters: Any = PARAMETERS) -> Any:
    found = read(QWEN_3_5, [text], tools={"f": parameters})
    [(_, arguments, whole)] = found.calls
    assert (whole, found.said) == (True, "")
    return json.loads(arguments)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", "null", "null"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", ' "x" \n', ' "x" \n'),
        ("text", "", ""),
        ("one of", "1", "1"),
        ("whole", "12", 12),
        ("whole", " -7\n", -7),
        ("joined", "12", 12),
        ("number", "1e3", 1000.0),
        ("number", "0.50", 0.5),
        ("flag", "True", True),
        ("flag", "false", False),
        ("none", "None", None),
        ("object", '{"a": [true, "</parameter></function>"]}', {"a": [True, "</parameter></function>"]}),
        ("object", "{'a': None}", {"a": None}),
        ("list", "[1, 2", [1, 2]),
        ("text or none", "None", None),
        ("text or none", "null", None),
        ("text or none", "nullable", "nullable"),
        ("text or none", "5", "5"),
        ("text or whole", "5", 5),
        ("text or whole", "5.5", "5.5"),
        ("text or whole", "None", "None"),
        ("text or object", '{"a": 1}', {"a": 1}),
        ("text or object", '{"a": 1', '{"a": 1'),
        ("anything", "5", 5),
        ("anything", "five", "five"),
        ("a parameter that nobody named", "5", "5"),
        # What is no value of its type stays a text.
        ("whole", "five", "five"),
        ("whole", "", ""),
        ("flag", "maybe", "maybe"),
        ("list", "a, b", "a, b"),
    ],
)
def test_a_value_has_the_type_of_its_schema(key: str, text: str, value: Any) -> None:
    assert repr(arguments_of(call((key, text)))) == repr({key: value})


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"additionalProperties": {"type": "integer"}}, 5),
        ({"patternProperties": {"^x": {"type": "integer"}}}, 5),
        ({"additionalProperties": True}, "5"),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"properties": {"x": {"type": "integer"}}}}}, 5),
        ({"anyOf": [{"properties": {"x": {"type": "integer"}}}, {"properties": {"y": {}}}]}, 5),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, 5),  # a circle: anything
        (None, "5"),
        ("no schema", "5"),
    ],
)
def test_types_are_found_wherever_a_schema_has_them(parameters: Any, value: Any) -> None:
    assert arguments_of(call(("x", "5")), parameters) == {"x": value}


@pytest.mark.parametrize(
    "text",
    [
        "a\n\n b\n",
        "</parameter>",
        "x</parameter> y\n</parameter>\n\n<parameter>",
        "</param\n<parameter=whole\n<function=g",
        "<tool_call>\n</tool_call>\n<tool_call>",
        "<parameter=unknown>\nx",
        "</function>\n<div class='a'></div>",
        "<|im_end|>&amp;\t\\n\"'",
        "</parameter>" + " " * 200,
    ],
)
def test_a_string_has_what_looks_like_tags(text: str) -> None:
    said = f"I look.\n\n{call(('text', text), ('whole', '3'))}\n{call(('text', text))}"
    found = read(QWEN_3_5, [said], tools={"f": PARAMETERS})
    assert [json.loads(arguments) for _, arguments, _ in found.calls] == [{"text": text, "whole": 3}, {"text": text}]
    assert found.said == "I look."
    for cut in range(len(said)):
        assert read(QWEN_3_5, [said[:cut], said[cut:]], tools={"f": PARAMETERS}) == found, cut
    assert read(QWEN_3_5, said, tools={"f": PARAMETERS}) == found


@pytest.mark.parametrize("rest", ["<function=", "<function=\n", "<function=</function>null</tool_call>\n"])
def test_text_behind_an_unclosed_call_is_one_at_every_cut(rest: str) -> None:
    said = f"<tool_call>\n<function=f>\n{rest}"
    found = read(QWEN_3_5, [said], tools={"f": PARAMETERS})
    assert [arguments for _, arguments, _ in found.calls] == ["{}"]
    for cut in range(len(said)):
        assert read(QWEN_3_5, [said[:cut], said[cut:]], tools={"f": PARAMETERS}) == found, cut


def test_a_string_streams_and_the_rest_comes_whole() -> None:
    def sent(*pieces: str) -> str:
        found = read(QWEN_3_5, pieces, tools={"f": PARAMETERS}, cut=True)
        assert [whole for _, _, whole in found.calls] == [False]
        return found.calls[0][1]

    begun = "<tool_call>\n<function=f>\n<parameter=text>\nPar"
    assert sent(begun) == '{"text": "Par'
    assert sent(begun, "is\n</par") == '{"text": "Paris'
    assert sent(begun, "\n</parameter>\n<parameter=whole>\n12") == '{"text": "Par"'
    assert sent(begun, "\n</parameter>\n<parameter=list>\n[1, {") == '{"text": "Par", "list": [1, {'
    assert sent("<tool_call>\n<function=f>\n<parameter=text or none>\nNon") == ""
    assert sent("<tool_call>\n<function=f>\n<parameter=text or none>\nNono") == '{"text or none": "Nono'


def test_a_call_in_reasoning_is_reasoning() -> None:
    found = read(QWEN_3_5, [f"I could {call()}\n</think>\n\n{call(('text', 'x'))}"], thinking=True)
    assert (found.thought, len(found.calls)) == (f"I could {call()}", 1)


# What the template renders is read again

words = st.lists(
    st.sampled_from([*"ab \n<>/\"'\\{}[],:0e.-", "é", "👍", "</parameter>", "</", "None", "true"]), max_size=12
).map("".join)
ENDS = ("</parameter>", "\n<parameter=", "</function>")
values = {
    "text": words,
    "whole": st.integers(-(10**20), 10**20),
    "number": st.floats(-1e15, 1e15),
    "flag": st.booleans(),
    "none": st.none(),
    "object": st.dictionaries(words, st.one_of(words, st.booleans(), st.none(), st.integers(-9, 9)), max_size=2),
    "list": st.lists(st.one_of(words, st.lists(words, max_size=2)), max_size=2),
}


def is_plain(value: Any) -> bool:
    """Return True if no text behind a tag's look-alike can be taken for the next tag."""
    return not isinstance(value, str) or not any(
        value.rstrip().endswith(end[:n]) for end in ENDS for n in (5, len(end))
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({}, optional=values), min_size=1, max_size=2),
    st.lists(st.integers(0, 400), max_size=4),
)
def test_calls_are_read_as_the_template_renders_them(many: list[dict[str, Any]], cuts: list[int]) -> None:
    many = [{key: value for key, value in one.items() if is_plain(value)} for one in many]
    calls = tuple(ToolCall(str(i), "f", json.dumps(one)) for i, one in enumerate(many))
    said = [Message("user", "?"), Message("assistant", "", tool_calls=calls)]
    text = TEMPLATE.render(said, now=NOW, generate=False)
    text = text[text.index("</think>\n\n") + 10 : text.rindex("<|im_end|>")]
    found = read(QWEN_3_5, [text], tools={"f": PARAMETERS})
    assert [json.loads(arguments) for _, arguments, _ in found.calls] == many
    assert found.said == ""
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert read(QWEN_3_5, [text[a:b] for a, b in itertools.pairwise(at)], tools={"f": PARAMETERS}) == found


@pytest.mark.parametrize(
    "arguments", ['{"city": "Par', "", "no JSON", '["a"]', '{"a": ' + "[" * 60 + "]" * 60 + "}", '{"a": 1e301}']
)
def test_arguments_that_are_no_object_are_rendered(arguments: str) -> None:
    """This template goes through them, and would fail for a text."""
    adapter = MessageAdapter(SOURCE, lambda text: text)
    said = [
        Message("user", "?"),
        Message("assistant", "", tool_calls=(ToolCall("1", "f", arguments),)),
        Message("user", "!"),
    ]
    shown, _ = adapter.conversation(said, adapter.told(TemplateInput()))
    text = TEMPLATE.render(shown, now=NOW)
    expected = "<parameter=city>\nPar\n</parameter>\n" if "Par" in arguments else ""
    assert f"<tool_call>\n<function=f>\n{expected}</function>\n</tool_call><|im_end|>" in text


def test_reasoning_stays_until_the_next_question() -> None:
    made = Message("assistant", "<think>\nHm.\n</think>\n\nI look.", tool_calls=(ToolCall("1", "f", "{}"),))
    said = [Message("user", "?"), made, Message("tool", "4", tool_call_id="1")]
    for variables, end in (({}, "<think>\n"), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")):
        text = TEMPLATE.render(said, now=NOW, given=TemplateInput((), variables))
        assert "<think>\nHm.\n</think>\n\nI look." in text
        assert text.endswith(f"<|im_start|>assistant\n{end}")
    later = [*said, Message("assistant", "Four."), Message("user", "And?")]
    assert "Hm." not in TEMPLATE.render(later, now=NOW)
