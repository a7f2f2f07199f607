"""Whole conversations with tools, reasoning and documents: every text is that of transformers' apply_chat_template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from text.test_template import NOW, TEMPLATES, FrozenClock
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from ssmd.model.artifact import SpecialTokens
from ssmd.model.source import Source
from ssmd.text.messages import Message
from ssmd.text.template import ChatTemplate, TemplateError
from ssmd.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
MODELS = ("granite4", "qwen3", "falcon-h1", "lfm2", "smollm2")
MORE = ("llama31", "hermes", "mistral-tools")  # of other ways to write tools and calls
SPECIAL = SpecialTokens(bos="<|endoftext|>", eos="<|im_end|>")
Fields = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", FrozenClock)
        yield


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer as a checkpoint has it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return folder


@cache
def library(folder: Path) -> PreTrainedTokenizerFast:
    settings = {"bos_token": SPECIAL.bos, "eos_token": SPECIAL.eos}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)


@cache
def ours(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


def official(folder: Path, source: str, messages: list[Fields], **asked: Any) -> str | None:
    """Return the text that transformers renders, or None if the template refuses or fails."""
    try:
        rendered = library(folder).apply_chat_template(messages, chat_template=source, tokenize=False, **asked)
    except Exception:  # a template can fail in any way
        return None
    assert isinstance(rendered, str)
    return rendered


def rendered(source: str, messages: list[Fields], add_generation_prompt: bool = False, **asked: Any) -> str | None:
    named = {name: asked.pop(name, None) for name in ("tools", "documents")}
    try:
        return ours(source).render_json(messages, now=NOW, generate=add_generation_prompt, variables=asked, **named)
    except TemplateError as err:
        assert str(err)  # noqa: PT017 - refusing is one of two good outcomes
        return None


# Conversations

# fmt: off
PIECES = (
    "<think>", "</think>", "<tool_response>", "</tool_response>", "\n", "\n\n", " ", "'", '"', "\\", "{{ x }}", "{%",
    "é", "日本", "👍", "<b>&amp;", "\x00", "\x85", "\u2028",
)
# fmt: on
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
texts = st.lists(st.one_of(st.sampled_from(PIECES), words), max_size=6).map("".join)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
objects = st.dictionaries(st.one_of(names, texts), values, max_size=3)
arguments = st.one_of(objects, objects.map(json.dumps))
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=2)


@st.composite
def calls(draw: st.DrawFn) -> Fields:
    function = {"name": draw(names), "arguments": draw(arguments)}
    return draw(st.sampled_from([{"type": "function", "id": "call_1", "function": function}, function]))


@st.composite
def answers(draw: st.DrawFn) -> Fields:
    answer: Fields = {"role": "assistant", "content": draw(texts)}
    kind = draw(st.sampled_from(["said", "thought", "thought apart", "called", "called in silence"]))
    if kind == "thought":
        answer["content"] = f"<think>\n{draw(texts)}\n</think>\n\n{answer['content']}"
    elif kind == "thought apart":
        answer[draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"]))] = draw(texts)
    elif kind != "said":
        answer["tool_calls"] = draw(st.lists(calls(), max_size=2))
        if kind == "called in silence":
            answer["content"] = None
    return answer


tools = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": names, "description": texts, "parameters": objects}),
    }
)
messages = st.tuples(
    st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": st.one_of(texts, parts)}), max_size=1),
    st.lists(
        st.one_of(
            st.fixed_dictionaries({"role": st.just("user"), "content": st.one_of(texts, texts, parts)}),
            answers(),
            st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "name": names}),
            st.fixed_dictionaries({"role": st.sampled_from(["system", "developer"]), "content": texts}),
        ),
        min_size=1,
        max_size=7,
    ),
).map(lambda both: both[0] + both[1])
asked = st.fixed_dictionaries(
    {"add_generation_prompt": st.booleans()},
    optional={
        "tools": st.one_of(st.none(), st.lists(tools, max_size=2)),
        "documents": st.one_of(
            st.none(), st.lists(st.fixed_dictionaries({"title": texts, "text": texts}, optional={"n": numbers}))
        ),
        "enable_thinking": st.booleans(),
        "keep_past_thinking": st.booleans(),
        "available_tools": st.lists(tools, max_size=1),
        "bos_token": texts,
    },
)
TOOL = {"type": "function", "function": {"name": "add", "description": "Add “two”\n", "parameters": {"a": [1.5, None]}}}
WHOLE: list[Fields] = [
    {"role": "system", "content": " Be terse. "},
    {"role": "user", "content": "What is 1 + 2 in Köln?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI'll see.", "reasoning_content": None},
    {"role": "user", "content": "Do it"},
    {"role": "assistant", "content": None, "tool_calls": [TOOL | {"function": {"name": "add", "arguments": {"ö": 1}}}]},
    {"role": "tool", "content": "3\n", "tool_call_id": "call_1"},
    {"role": "tool", "content": "", "tool_call_id": "call_2"},
    {"role": "assistant", "content": "3", "reasoning": "\nThe tool says so.\n"},
]


@pytest.mark.parametrize("name", [*MODELS, *MORE])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=messages, asked=asked)
@example(messages=WHOLE, asked={"add_generation_prompt": True, "tools": [TOOL, TOOL]})
@example(messages=WHOLE, asked={"add_generation_prompt": False, "documents": [{"title": "ß", "text": "<b>\n"}]})
@example(messages=WHOLE[:2], asked={"add_generation_prompt": True, "enable_thinking": False})
def test_any_conversation_renders_as_in_transformers(
    name: str, vocabulary: Path, messages: list[Fields], asked: Fields
) -> None:
    source = TEMPLATES[name]
    assert rendered(source, messages, **asked) == official(vocabulary, source, messages, **asked)


def test_the_conversations_reach_every_part_of_the_templates(vocabulary: Path) -> None:
    """Otherwise the test above would compare refusals."""
    texts = {name: rendered(TEMPLATES[name], WHOLE, tools=[TOOL], documents=[{"text": "D"}]) or "" for name in MODELS}
    assert {name for name, text in texts.items() if '"description": "Add “two”\\n"' in text} == {*MODELS} - {"smollm2"}
    assert '{"text": "D"}' in texts["granite4"]
    assert '<tool_call>\n{"name": "add", "arguments": {"ö": 1}}\n</tool_call>' in texts["qwen3"]
    assert "<think>\nThe tool says so.\n</think>\n\n3" in texts["qwen3"]
    assert "[add(ö=1)]" in texts["lfm2"]
    assert "hm" not in texts["lfm2"]
    assert "hm" in (rendered(TEMPLATES["lfm2"], WHOLE, keep_past_thinking=True) or "")
    assert not texts["smollm2"]  # its messages need a content


# Control tokens in what people say: kept plain, which is where ssmd and transformers' default differ


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(
        st.lists(st.one_of(st.sampled_from([*tiny.SPECIAL, "\U00100001", "\U0010fff0", *PIECES]), words)).map("".join),
        min_size=1,
        max_size=4,
    )
)
def test_escaped_messages_render_as_the_plain_ones_do(name: str, vocabulary: Path, said: list[str]) -> None:
    """Once the escapes are undone the text is transformers'; its control tokens are those of the template alone."""
    tokenizer = Tokenizer.open(vocabulary / "tokenizer.json")
    conversation = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(said)]
    escaped = [Message(m.role, tokenizer.escape(m.content)) for m in conversation]
    text = ours(TEMPLATES[name]).render(escaped, now=NOW, generate=False)
    plain = [m.to_json() for m in conversation]
    assert tokenizer.unescape(text) == official(vocabulary, TEMPLATES[name], plain)
    empty = ours(TEMPLATES[name]).render([Message(m.role, "x") for m in conversation], now=NOW, generate=False)
    controls = [t for t in tokenizer.encode(empty) if tokenizer.is_control(t)]
    assert [t for t in tokenizer.encode(text) if tokenizer.is_control(t)] == controls


# Tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_source(tmp_path_factory.mktemp("checkpoint") / "tiny", "llama")


@pytest.mark.parametrize("place", ["file", "settings", "named"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoints_tokens_are_those_of_transformers(checkpoint: Path, name: str, place: str) -> None:
    """Template and special tokens where a checkpoint may have them; text, and ids without another BOS."""
    template, settings = checkpoint / "chat_template.jinja", checkpoint / "tokenizer_config.json"
    special: Fields = {"bos_token": SPECIAL.bos, "eos_token": {"__type": "AddedToken", "content": SPECIAL.eos}}
    special |= {"add_bos_token": True, "pad_token": None}
    template.unlink(missing_ok=True)
    if place == "file":
        template.write_text(TEMPLATES[name])
        special["chat_template"] = "that of the settings"
    elif place == "settings":
        special["chat_template"] = TEMPLATES[name]
    else:
        special["chat_template"] = [
            {"name": "default", "template": TEMPLATES[name]},
            {"name": "rag", "template": "another"},
        ]
    settings.write_text(json.dumps(special))
    source = Source.open(checkpoint)
    said = [m for m in WHOLE if isinstance(m["content"], str) and m["role"] != "tool"]
    whole = AutoTokenizer.from_pretrained(checkpoint)
    text = ChatTemplate(source.chat_template or "", SpecialTokens(**source.special_tokens)).render_json(said, now=NOW)
    assert text == whole.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    ids = Tokenizer.open(checkpoint / "tokenizer.json", stop_tokens=source.stop_tokens).encode(text)
    assert ids == whole.apply_chat_template(said, add_generation_prompt=True, return_dict=False)


# What transformers' environment has


FEATURES = dict(
    part.split("\n", 1) for part in (DATA / "template-features.txt").read_text().removesuffix("\n").split("\n## ")[1:]
)


REFUSED = {"raise_exception", "undefined goes on", "undefined added", "tojson of nothing", "not to be had"}
REFUSED |= {"reserved names"}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_transformers_environment_has(vocabulary: Path, feature: str) -> None:
    messages = [{"role": "user", "content": "é “q”\n"}, {"role": "assistant", "content": "ab cd"}]
    texts = []
    for asked in ({}, {"tools": [TOOL], "documents": []}, {"date_string": "1 May", "tools": []}):
        texts.append(rendered(FEATURES[feature], messages, **asked))
        assert texts[-1] == official(vocabulary, FEATURES[feature], messages, **asked)
    assert any(text is not None for text in texts) == (feature not in REFUSED)


def test_the_template_refuses_in_its_own_words() -> None:
    with pytest.raises(TemplateError, match=r"^Unknown role: developer$"):
        ours(TEMPLATES["falcon-h1"]).render_json([{"role": "developer", "content": ""}], now=NOW)


# Limits, with what comes in beside the messages


def test_tools_do_not_lift_the_limits() -> None:
    given = [{"name": f"f{i}", "text": "x" * 1000} for i in range(100)]
    message = [{"role": "user", "content": "x"}]
    for source, said in (
        ("{% for a in tools %}" * 5 + "{% endfor %}" * 5, "runs for more than 1 s"),
        ("{% for a in tools %}{% for b in tools %}{{ tools | tojson }}{% endfor %}{% endfor %}", "more than"),
        ("{{ variable * 10**9 }}", "makes a value of more than"),
    ):
        with pytest.raises(TemplateError, match=said):
            ours(source).render_json(message, now=NOW, tools=given, variables={"variable": "x" * 1000})


@pytest.mark.parametrize("name", MODELS)
def test_many_tools_and_long_results_are_rendered(name: str) -> None:
    called = {"function": {"name": "f", "arguments": {"text": "x" * 1_000_000}}}
    conversation: list[Fields] = [
        *({"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [called] * 3}),
        {"role": "tool", "content": "y" * 3_000_000},
    ]
    tools = [{"name": f"f{i}", "description": "z" * 10_000} for i in range(100)]
    text = ours(TEMPLATES[name]).render_json(conversation, now=NOW, tools=tools)
    assert len(text) > (3_000_000 if name == "smollm2" else 7_000_000)


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tools": [{"x": object()}]}, "is given a object, which is not JSON"),
        ({"documents": [{"x": b"bytes"}]}, "is given a bytes, which is not JSON"),
        ({"tools": deep(100_000)}, "nests more than 64 deep"),
        ({"variables": {"messages": []}}, "messages cannot be given as a variable"),
        ({"variables": {"strftime_now": "x"}}, "strftime_now cannot be given as a variable"),
        ({"variables": {"add_generation_prompt": False}}, "add_generation_prompt cannot be given"),
    ],
)
def test_what_a_template_is_not_given(asked: Fields, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        ours("{{ tools }}").render_json([{"role": "user", "content": "x"}], now=NOW, **asked)
