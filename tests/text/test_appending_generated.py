"""Generated templates: whatever they ask for, a text is claimed to stay only if it does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from text.test_appending import grows, message, turns

from ssmd.text.messages import Message

BEFORE = """{% set ns = namespace(x='o', y=1) %}{% set own = ns %}{% set g = ['s', 't', 'u'] | map('string') %}
{% set h = [messages[0].content] | map('upper') %}{% set e = [ns] | selectattr('nope') %}
{% macro f(a) %}{{ a }}{% set ns.x = a if a == 'x' else ns.x %}{% endmacro %}"""

# fmt: off
CONDITIONS = (
    "m.role == 'user'", "m.content", "loop.first", "loop.last", "loop.index is odd", "ns.x == 'o'", "v",
    "messages[1:]", "loop.nextitem is defined", "loop.index0 > 2", "m.content == v",
    "add_generation_prompt is defined", "messages",
)
HARMLESS = (
    "{{ m.content }}", "{{ m.role }}", "{{ loop.index }}", "{{ loop.cycle('a', 'b', 'c') }}", "{{ v }}", "{{ ns.x }}",
    "\n", "{% set v = m.content %}", "{% set own = namespace(x=m.content) %}", "{% set own.x = 'q' %}",
    "{{ f(loop.index) }}", "{% set v %}{{ v }}{{ m.role }}{% endset %}",
    "{% filter trim %} {{ m.content }} {% endfilter %}", "{{ own.x }}",
    "{% for i in [1, 2] %}{{ loop.index }}{% set v = i %}{% endfor %}", "{{ messages[0].content }}",
    "{{ f(m.content) }}", "{% for c in [m.content] | map('trim') %}{{ c }}{{ loop.changed(1) }}{% endfor %}",
    "{% set messages = messages[1:] %}", "{% macro k(a) %}{{ a }}{{ loop.index }}{% endmacro %}{{ k(1) }}",
    "{% generation %}{{ m.content }}{% endgeneration %}", "{% with v = 1 %}{{ v }}{% endwith %}",
    "{% call f(1) %}x{% endcall %}", "{{ k(2) if k is defined }}",
)
HOSTILE = (
    "{% set ns.x = m.content %}", "{% set ns.x = (ns.x ~ 'i')[-3:] %}", "{% set ns.x %}{{ m.role }}{% endset %}",
    "{{ g | first }}", "{{ g | list }}", "{% for c in g %}{{ c }}{% break %}{% endfor %}", "{{ h | list }}",
    "{{ e | list }}", "{{ loop.length }}", "{{ loop.changed(m.role) }}", "{{ loop.revindex }}",
    "{{ loop.nextitem.content if loop.nextitem }}", "{{ m in messages }}",
    "{{ loop.previtem.content if loop.previtem }}", "{{ messages | length }}", "{{ messages[-1].content }}",
    "{% set v = loop %}", "{{ messages[loop.index0].content }}", "{{ 'p' if add_generation_prompt else 'n' }}",
    "{{ messages[1:] | length }}", "{{ loop.last and add_generation_prompt }}",
    "{{ add_generation_prompt and loop.last }}", "{{ (messages | last).role }}",
    "{{ messages | map(attribute='role') | join }}", "{% for x in messages %}{{ x.role }}{% endfor %}", "{% break %}",
    "{{ messages is sequence }}", "{{ 'k' if messages[2:] else 'l' }}", "{{ messages == [m] }}", "{% continue %}",
    "{{ m.content is sameas messages[0].content }}", "{% set ns.y = namespace(x=m.role) %}",
    "{{ (messages | first).role }}", "{% set ns.y = [m.role] | map('upper') %}",
    "{{ ns.y | list if ns.y is iterable }}", "{{ messages is iterable }}",
)
BEFORE_IT = (
    "{% for t in [1, 2] %}{{ t }}{% set ns.x = t %}{% endfor %}", "{{ g | first }}", "{% if messages %}m{% endif %}",
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}", "{% set v = 'top' %}",
    "{% set e = messages | map(attribute='role') %}", "{% set own = namespace(x=0) %}",
)
AFTER_IT = (
    "{{ messages | length }}", "{{ messages[-1].content }}", "{{ 'p' if add_generation_prompt else 'n' }}",
    "{{ g | list }}", "{{ ns.x }}", "{% set ns.x = 'end' %}{{ e | list }}", "{{ v }}", "{{ h | list }}",
    "{{ (messages | last).role }}", "\n", "{% for x in 'cd' %}{{ x }}{{ loop.last }}{% endfor %}",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
)
LOOPS = (
    *("{% for m in messages %}…{% endfor %}",) * 6, "{% for m in messages[1:] %}…{% endfor %}",
    "{% with q = 1 %}{% for m in messages[:] %}…{% endfor %}{% endwith %}",
    "{% for m in messages if m.content %}…{% endfor %}", "{% for m in messages %}…{% else %}none{% endfor %}",
    "{% set z %}{% for m in messages %}…{% endfor %}{% endset %}{{ z | trim }}",
    "{% filter trim %}{% for m in messages %}…{% endfor %}{% endfilter %}",
    "{% for m in messages recursive %}…{% endfor %}",
    "{% macro all() %}{% for m in messages %}…{% endfor %}{% endmacro %}{{ all() | trim }}",
    "{% for i in [1] %}{% for m in messages %}…{% endfor %}{% endfor %}",
    "{% autoescape true %}{% for m in messages %}…{% endfor %}{% endautoescape %}",
)
# fmt: on


def some(of: tuple[str, ...], least: int, most: int) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(of), min_size=least, max_size=most).map("".join)


conditional = st.builds(
    "{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format,
    st.sampled_from(CONDITIONS),
    some((*HARMLESS, *HOSTILE), 1, 2),
    some(HARMLESS, 0, 1),
)
bodies = st.lists(st.one_of(some(HARMLESS, 1, 2), some(HOSTILE, 1, 1), conditional), min_size=1, max_size=3).map(
    "".join
)
sources = st.tuples(some(BEFORE_IT, 0, 2), st.sampled_from(LOOPS), bodies, some(AFTER_IT, 0, 2)).map(
    lambda parts: BEFORE + parts[0] + parts[1].replace("…", parts[2] + "{{ m.content }};") + parts[3]
)
few = st.lists(message, min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(source=sources, said=st.lists(message, min_size=2, max_size=5), chain=st.lists(few, min_size=2, max_size=2))
def test_a_template_that_could_do_otherwise_is_rendered_whole(
    source: str, said: list[Message], chain: list[list[Message]]
) -> None:
    grows(source, said, chain)


def test_many_of_these_templates_grow() -> None:
    """Otherwise the test above would compare nothing."""
    said = turns("a", "b", "x", "d")
    kinds = [grows(BEFORE + LOOPS[0].replace("…", one + "{{ m.content }};"), said, [said[3:]]) for one in HARMLESS]
    assert sum(map(bool, kinds)) > len(HARMLESS) * 0.8
    kinds = [grows(BEFORE + LOOPS[0].replace("…", one + "{{ m.content }};"), said, [said[3:]]) for one in HOSTILE]
    assert sum(map(bool, kinds)) < len(HOSTILE) * 0.2
