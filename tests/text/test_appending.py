"""Texts that only grow: what was settled and what is rendered after it is the whole text, or nothing is claimed."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text.test_template import NOW, SPECIAL, TEMPLATES

from ssmd.text.messages import Message, Role
from ssmd.text.template import ChatTemplate, RenderedText, StablePrefix, TemplateError

GROWING = {name: TEMPLATES[name] for name in ("dated", "falcon-h1", "granite4", "llama3", "mistral", "smollm2")}
GROWING |= {
    "tiny": tiny.TEMPLATE,
    "chatml": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
        "{% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}\n"
        "{% elif m['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + m['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}"
        "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
        "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "what loops know": (
        "{% macro show(m, n) %}{{ n }}:{{ m.role | upper }}={{ m.content | trim }}{% endmacro %}"
        "{% for m in messages %}{{ show(m, loop.index) }}{{ loop.cycle('a', 'b', 'c') }}{{ loop.depth }}"
        "{% if loop.first %}F{% endif %}{% set word = namespace(n=0) %}"
        "{% for w in m.content.split() if w %}{% set word.n = word.n + loop.index %}{{ loop.previtem }}{% endfor %}"
        "{{ word.n }}{% if m.content == 'stop' %}{% break %}{% elif m.content == 'go' %}{% continue %}{% endif %}"
        "{% if m.role == 'user' and not loop.last %},{{ loop.nextitem.role[:1] }}{% endif %};{% endfor %}"
        "{{ messages | length }}{{ messages[-1].role }}{{ (messages | last).content == messages[-1].content }}"
    ),
    "a filter's items": "{% for m in messages %}"
    + "{% for c in [m.role, m.content] | map('trim') %}{{ c }}{% endfor %}|{% endfor %}",
    "other loops": (
        "{% for x in 'ab' %}{{ x }}{% endfor %}{% for m in messages %}{{ m.content }};{% endfor %}"
        "{% for x in [3, 4] %}{{ x * loop.index }}{% endfor %}"
    ),
    "one way or the other": (
        "{% if messages and messages[1:] is iterable and messages is not none %}{% for m in messages[1:] %}"
        "{{ m.role }}{{ m.content }}{% endfor %}{% else %}{% for m in messages %}x{% endfor %}{% endif %}"
    ),
}

# Each could be taken for one that grows, and is none, or would need what is not there.
LOOP = "{{ m.content }}{% endfor %}"
OTHERS = {name: TEMPLATES[name] for name in ("forgetful", "features", "lfm2", "qwen3")}
OTHERS |= {
    "length": "{{ messages | length }}{% for m in messages %}" + LOOP,
    "length in the loop": "{% for m in messages %}{{ messages | count }}" + LOOP,
    "length of a loop": "{% for m in messages %}{{ loop.length }}" + LOOP,
    "from the end": "{% for m in messages %}{{ loop.revindex0 }}" + LOOP,
    "the last": "{% for m in messages %}{{ messages[-1].role }}" + LOOP,
    "the second": "{{ messages[1].content }}{% for m in messages %}" + LOOP,
    "the second, counted from one": "{{ messages[1:][0].content }}{% for m in messages %}" + LOOP,
    "every second": "{% for m in messages[::2] %}" + LOOP,
    "the one before": "{% for m in messages %}{{ messages[loop.index0 - 1] if loop.index0 > 1 }}" + LOOP,
    "backwards": "{% for m in messages | reverse %}" + LOOP,
    "the first two": "{% for m in messages[:2] %}" + LOOP,
    "twice": "{% for m in messages %}x{% endfor %}{% for m in messages %}" + LOOP,
    "within another": "{% for i in [1] %}{% for m in messages %}" + LOOP + "{% endfor %}",
    "in a macro": "{% macro all() %}{% for m in messages %}" + LOOP + "{% endmacro %}{{ all() }}",
    "captured": "{% set all %}{% for m in messages %}" + LOOP + "{% endset %}{{ all | trim }}",
    "filtered": "{% filter trim %}{% for m in messages %}" + LOOP + "{% endfilter %}",
    "call": "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{% for m in messages %}{% endfor %}{% endcall %}",
    "users' only": "{% for m in messages if m.role == 'user' %}{{ loop.last }}" + LOOP,
    "else": "{% for m in messages %}{% if m.content %}{% continue %}{% endif %}{{ m.role }}{% else %}none{% endfor %}",
    "recursive": "{% for m in messages recursive %}" + LOOP,
    "counted": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{{ n.x }}" + LOOP,
    "captured in a namespace": "{% set n = namespace(x='') %}"
    "{% for m in messages %}{% set n.x %}{{ n.x }}.{% endset %}{{ n.x }}" + LOOP,
    "kept from the turn before": "{% set g = [1, 2, 3] | map('string') %}{% for m in messages %}{{ g | first }}" + LOOP,
    "used up": "{% set g = [1, 2] | map('string') %}{% for m in messages %}{{ g | list }}" + LOOP,
    "joiner": "{% set j = joiner(',') %}{% for m in messages %}{{ j() }}" + LOOP,
    "cycler": "{% set c = cycler('a', 'b', 'c') %}{% for m in messages %}{{ c.next() }}" + LOOP,
    "changed": "{% for m in messages %}{{ loop.changed(m.role) }}" + LOOP,
    "the loop itself": "{% for m in messages %}{{ loop | string }}" + LOOP,
    "the loop passed on": "{% macro f(l) %}{{ l.length }}{% endmacro %}{% for m in messages %}{{ f(loop) }}" + LOOP,
    "the loop by name": "{% for m in messages %}{{ loop['length'] }}" + LOOP,
    "asked before": "{% if add_generation_prompt %}x{% endif %}{% for m in messages %}" + LOOP,
    "asked in the loop": "{% for m in messages %}{{ 'x' if add_generation_prompt and loop.last }}" + LOOP,
    "all as JSON": "{{ messages | tojson }}{% for m in messages %}" + LOOP,
    "all as a text": "{{ (messages | string)[:3] }}{% for m in messages %}" + LOOP,
    "compared": "{{ messages == [] }}{% for m in messages %}" + LOOP,
    "one of them": "{{ {'role': 'user', 'content': 'x'} in messages }}{% for m in messages %}" + LOOP,
    "a sequence": "{{ messages is sequence }}{% for m in messages %}" + LOOP,
    "by attribute": "{{ messages | attr('count') is defined }}{% for m in messages %}" + LOOP,
    "a method": "{{ messages.count(1) }}{% for m in messages %}" + LOOP,
    "from the sixth": "{% if messages[5:] %}x{% endif %}{% for m in messages %}" + LOOP,
    "the same text": "{% for m in messages %}{{ m.content is sameas messages[0].content }}" + LOOP,
    "a block": "{% for m in messages %}{% block b scoped %}{{ loop.length }}{% endblock %}" + LOOP,
    "escapes left on": (
        "{% for m in messages %}{{ m.content }}{% autoescape true %}{% if loop.first %}{% continue %}{% endif %}"
        "{% endautoescape %}{% endfor %}"
    ),
    "nothing": "{{ messages[0].content }}",
}  # fmt: skip


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


def whole(source: str, messages: list[Message]) -> str | None:
    try:
        return template(source).render(messages, now=NOW)
    except TemplateError:
        return None


def grows(source: str, said: list[Message], chain: list[list[Message]]) -> list[StablePrefix]:
    """Check a conversation that goes on, time and again, from where the text was settled. Where it was."""
    text = whole(source, said)
    if text is None:
        return []
    rendered: RenderedText | None = template(source).render_settled(said, now=NOW)
    assert rendered is not None
    assert rendered.text == text
    kept, found = "", list[StablePrefix]()
    for more in chain:
        if rendered is None or rendered.settled is None:
            break
        at = rendered.settled
        assert 0 < at.messages < len(said)
        assert at.characters <= len(rendered.text)
        found.append(at)
        kept += rendered.text[: at.characters]
        said = [*said[: at.messages], *more]
        rendered = template(source).render_after(said[0], at.messages, more, now=NOW)
        assert rendered is None or kept + rendered.text == whole(source, said)
    return found


# fmt: off
PIECES = (
    "x", " ", "\n", "stop", "go", "user", "", "é", "<b>&", "</think>", "<think>", "ab cd", "  x  ", "system", "[/INST]",
    "\U0010fff8here\U0010fff8",
)
# fmt: on
roles = st.sampled_from(["user", "assistant", "user", "assistant", "system"])
texts = st.one_of(st.sampled_from(PIECES), st.lists(st.sampled_from(PIECES), max_size=3).map("".join))
message = st.builds(Message, roles, texts, st.sampled_from([None, None, "Ann"]))
messages = st.lists(message, min_size=2, max_size=8)
chains = st.lists(st.lists(message, min_size=1, max_size=4), min_size=1, max_size=3)


def turns(*said: str) -> list[Message]:
    """A conversation of user and assistant in turn, after a system prompt."""
    others: tuple[Role, Role] = ("user", "assistant")
    return [Message("system", "s"), *(Message(others[i % 2], text) for i, text in enumerate(said))]


@pytest.mark.parametrize("name", sorted(GROWING))
@settings(max_examples=120, deadline=None)
@given(said=messages, chain=chains)
@example(said=turns("a", " "), chain=[turns(" ", " "), turns(" ")[1:], turns("stop", "x")])
@example(said=turns("a", "b", "c")[1:], chain=[turns("", "")[1:], turns("", "", "")[1:]])
def test_settled_text_and_the_text_rendered_after_it_are_whole(
    name: str, said: list[Message], chain: list[list[Message]]
) -> None:
    grows(GROWING[name], said, chain)


@pytest.mark.parametrize("name", sorted(GROWING.keys() - {"what loops know"}))  # that looks at what follows
@pytest.mark.parametrize("system", [True, False])
def test_every_message_but_the_last_is_settled(name: str, system: bool) -> None:
    """In templates whose text grows; otherwise the test above would compare nothing."""
    said = turns(*"abcdefghijk")[not system or name == "mistral" :]
    chain = [said[n - 1 : n + 2] for n in range(3, len(said) - 1, 2)]
    assert [at.messages for at in grows(GROWING[name], said[:3], chain)] == [2 + 2 * i for i in range(len(chain))]


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_other_templates_are_rendered_whole(name: str) -> None:
    said = turns("a", "b", "c", "d", "e")
    text = whole(OTHERS[name], said)
    assert text is not None
    assert template(OTHERS[name]).render_settled(said, now=NOW) == RenderedText(text, None)
    for at in range(1, len(said) - 1):
        assert template(OTHERS[name]).render_after(said[0], at, said[at:], now=NOW) is None


def test_a_message_that_looks_at_the_next_is_settled_with_it() -> None:
    """The text before a message must not know it: another may stand there the next time."""
    source = "{% for m in messages %}{{ m.content }}{{ (loop.nextitem or m).content if m.role == 'user' }}{% endfor %}"
    said = turns("a", "b", "c", "d")
    at = [
        (template(source).render_settled(said[:n], now=NOW).settled or StablePrefix(0, 0)).messages for n in (3, 4, 5)
    ]
    assert at == [1, 3, 3]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ (loop.previtem or m).content if m.role == 'assistant' }}{{ m.content }}{% endfor %}",
        "{% for m in messages[3:] %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_needs_absent_messages_is_rendered_whole(source: str) -> None:
    said = turns("a", "b", "c", "d")[1:]
    assert template(source).render_settled([*said, *said], now=NOW).settled is not None
    assert template(source).render_after(said[0], 1, said[1:], now=NOW) is None


def test_a_space_that_a_continued_answer_loses_may_lie_before_it() -> None:
    source = "{% for m in messages %} {{ m.content | trim }}{% endfor %}"
    said = [Message("user", "a"), Message("user", ""), Message("assistant", "")]
    assert template(source).render_settled(said, now=NOW) == RenderedText(" a", None)
    assert template(source).render_after(said[0], 2, said[2:], now=NOW) is None


def test_a_conversation_of_one_message_has_nothing_settled() -> None:
    one = [Message("user", "x")]
    assert template(tiny.TEMPLATE).render_settled(one, now=NOW).settled is None
    assert template(tiny.TEMPLATE).render_settled([], now=NOW).settled is None


def test_what_nests_too_deep_to_be_led_is_rendered_whole() -> None:
    """It compiles as it is. With the code around it, deeper in the stack, it does not: that is not an error."""

    def deeper(frames: int) -> RenderedText:
        return deeper(frames - 1) if frames else one.render_settled(said, now=NOW)

    said, depth = turns("a", "b"), 0
    with suppress(TemplateError):
        while depth := depth + 1:
            nested = "(" * depth + "loop.last" + ")" * depth
            one = ChatTemplate(f"{{% for m in messages %}}{{{{ m.content if {nested} }}}}{{% endfor %}}", SPECIAL)
    assert deeper(30) == RenderedText("b", None)
