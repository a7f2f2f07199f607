"""Chat templates: the text of transformers' own renderer, continued answers, refusals, and bombs that are stopped."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from ssmd.model.artifact import SpecialTokens
from ssmd.text.messages import Message
from ssmd.text.template import MAX_SOURCE, ChatTemplate, TemplateError

NOW = datetime(2026, 11, 21, 9, 5, tzinfo=UTC)
SPECIAL = SpecialTokens(bos="<s>", eos="</s>")

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parents[1] / "data" / "templates").glob("*.jinja")}

CONVERSATIONS: dict[str, list[Message]] = {
    "one": [Message("user", "What is the capital of France?")],
    "system": [Message("system", " Be terse. "), Message("user", "Hi\n there <b>&")],
    "three turns": [
        Message("user", "a\nb"),
        Message("assistant", "<think>\nhm\n</think>\n\nFine. "),
        Message("user", "日本語 👍"),
    ],
    "assistant last": [Message("user", "Tell"), Message("assistant", "Once upon")],
}


class FrozenClock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> FrozenClock:
        return cls(2026, 11, 21, 9, 5, tzinfo=tz)


def transformers_renders(source: str, messages: list[Message], **kwargs: Any) -> str:
    compile_template = chat_template_utils._cached_compile_jinja_template
    rendered: str = compile_template(source).render(
        messages=[m.to_json() for m in messages],
        tools=None,
        documents=None,
        bos_token=SPECIAL.bos,
        eos_token=SPECIAL.eos,
        **kwargs,
    )
    return rendered


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", FrozenClock)


def refusal(source: str, messages: list[Message] | None = None, **kwargs: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source, SPECIAL).render(messages or CONVERSATIONS["one"], now=NOW, **kwargs)
    return str(caught.value)


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(("name", "messages"), [*itertools.product(TEMPLATES, CONVERSATIONS)])
def test_the_text_is_that_of_transformers(name: str, messages: str, generate: bool) -> None:
    source, conversation = TEMPLATES[name], CONVERSATIONS[messages]
    if name == "mistral" and messages == "system":
        assert refusal(source, conversation).startswith("Conversation roles must alternate")
        return
    generate = generate and conversation[-1].role != "assistant"  # that is continued: the next test
    expected = transformers_renders(source, conversation, add_generation_prompt=generate)
    assert ChatTemplate(source, SPECIAL).render(conversation, now=NOW, generate=generate) == expected


@pytest.mark.parametrize("name", ["smollm2", "llama3", "granite4", "qwen3", "mistral"])
@pytest.mark.parametrize("content", ["Once upon", "", "Once ", "  \n two  \n"])
def test_a_final_assistant_message_continues_like_transformers(name: str, content: str) -> None:
    conversation = [*CONVERSATIONS["one"], Message("assistant", content)]
    rendered, _ = chat_template_utils.render_jinja_template(
        [[m.to_json() for m in conversation]],
        chat_template=TEMPLATES[name]
        .replace("strftime_now is defined", "false")
        .replace("strftime_now('%B %d, %Y')", "'November 21, 2026'"),
        continue_final_message=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    ours = ChatTemplate(TEMPLATES[name].replace("strftime_now is defined", "false"), SPECIAL)
    text = ours.render(conversation, now=NOW)
    assert text == rendered[0]
    assert text.rstrip().endswith(content.strip())


def test_continuing_trims_only_where_the_template_does() -> None:
    conversation = [Message("user", "x"), Message("assistant", "One two ")]
    assert ChatTemplate(TEMPLATES["smollm2"], SPECIAL).render(conversation, now=NOW).endswith("assistant\nOne two ")
    assert (
        ChatTemplate(TEMPLATES["llama3"], SPECIAL)
        .render(conversation, now=NOW)
        .endswith("<|end_header_id|>\n\nOne two")
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "drops"),
        ("{{ messages[-1].content | replace('One', 'Two') }}", "changes"),
        ("{{ messages[-1].content.split('</think>')[-1] }}", "changes"),
    ],
)
def test_an_answer_that_the_template_alters_cannot_be_continued(source: str, said: str) -> None:
    messages = [Message("user", "x"), Message("assistant", "<think>One</think>two")]
    assert said in refusal(source, messages)


def test_the_clock_is_the_given_one_and_absent_tokens_undefined() -> None:
    template = ChatTemplate("{{ strftime_now('%H:%M') }}|{{ pad_token }}|{{ bos_token }}", SPECIAL)
    assert template.render(CONVERSATIONS["one"], now=NOW) == "09:05||<s>"


def test_the_templates_own_refusal_is_the_message() -> None:
    assert refusal("{{ raise_exception('After the optional system message') }}") == "After the optional system message"


def test_a_template_that_outputs_non_text_fails_like_any_other() -> None:
    assert "expected str instance, dict found" in refusal("{% call(x) dict() %}{% endcall %}")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for %}", "{{ 'a'|random }}", "{% unknown %}", "{{ 1 | lipsum }}"]
)
def test_a_template_that_is_no_template(source: str) -> None:
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate(source, SPECIAL)


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'x' %}",
        "{% import 'x' as x %}",
        "{% extends '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ raise_exception._function.__globals__ }}",
        "{{ self._TemplateReference__context.environment.loader }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{0[__class__].x}'.format('') }}",
        "{{ 'x'.encode() }}",
        "{{ (1).to_bytes(100, 'big') }}",
        "{{ dict.mro() }}",
        "{{ dict.fromkeys.__globals__['sys'] }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ lipsum() }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].role.x }}",
        "{{ strftime_now('%9999999d') }}",
        "{{ strftime_now('x' * 1000) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    assert refusal(source)


def test_long_conversations_stay_within_the_limits() -> None:
    messages = [Message("user" if i % 2 == 0 else "assistant", f"{i} " + "word " * 200) for i in range(400)]
    for source in (TEMPLATES["smollm2"], TEMPLATES["llama3"], TEMPLATES["granite4"], TEMPLATES["qwen3"]):
        assert len(ChatTemplate(source, SPECIAL).render(messages[:-1], now=NOW)) > 390_000


def test_a_large_source_is_refused() -> None:
    with pytest.raises(TemplateError, match=str(MAX_SOURCE)):
        ChatTemplate("x" * (MAX_SOURCE + 1), SPECIAL)
    with pytest.raises(TemplateError):
        ChatTemplate("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", SPECIAL)
