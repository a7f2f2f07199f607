"""Template bombs: each is stopped in about a second of CPU time and without much memory, and the others go on."""

from __future__ import annotations

import sys
import threading
import time
from datetime import UTC, datetime

import pytest

from ssmd.model.artifact import SpecialTokens
from ssmd.text.jinja import meter
from ssmd.text.messages import Message
from ssmd.text.template import ChatTemplate, TemplateError

NOW = datetime(2026, 11, 21, 9, 5, tzinfo=UTC)
SPECIAL = SpecialTokens()
MESSAGES = [Message("user", "What is the capital of France?")]
LONG = "x" * 10_000
LIMIT_S = 0.25  # a quarter of what templates have; those that are stopped by it go on for all of it


def grown(start: str, step: str, end: str = "{{ n.x }}") -> str:
    """A value that every turn of a loop makes from the one before."""
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set n.x = {step} %}}{{% endfor %}}{end}"


def macro(body: str, call: str) -> str:
    return f"{{% macro m(d) %}}{{% if d %}}{body}{{% else %}}{{{{ varargs }}}}{{% endif %}}{{% endmacro %}}{call}"


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that only tests": (
        "{% for a in range(99999) if range(99999) | select('odd') | list | length == 0 %}{% endfor %}"
    ),
    "a loop with conditions": (
        "{% for a in range(99999) %}{% for b in range(99999) if false %}x{% endfor %}{% endfor %}"
    ),
    "range": "{{ range(10**9) | list }}",
    "string times": "{{ 'x' * 10**9 }}",
    "list times": "{{ [1] * 10**9 }}",
    "times string": "{{ 10**9 * 'x' }}",
    "power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "growing number": grown("3", "n.x * n.x"),
    "doubling ~": grown("'x'", "n.x ~ n.x"),
    "doubling +": grown("'x'", "n.x + n.x"),
    "doubling lists": grown("[1]", "n.x + n.x", ""),
    "laughs": grown("[1]", "[n.x, n.x]"),
    "dict laughs": grown("1", "{'a': n.x, 'b': n.x}", ""),
    "tuple laughs": grown("1", "(n.x, n.x)"),
    "laughing namespaces": grown("1", "namespace(a=n.x, b=n.x)", "{{ [n.x, n.x] | string }}"),
    "arguments": macro("{{ m(d - 1, *(varargs + varargs)) }}", "{{ m(60, 1, 1) }}"),
    "argument laughs": macro("{{ m(d - 1, varargs, varargs) }}", "{{ m(60, 1) }}"),
    "macro fan": macro("{{ m(d - 1) }}{{ m(d - 1) }}", "{{ m(60) }}"),
    "block fan": macro("{% call m(d - 1) %}{{ caller and 1 }}{% endcall %}" * 2 + "{{ caller and 1 }}", "{{ m(60) }}"),
    "recursive loop": "{% for a in range(99) recursive %}{{ loop(range(99)) if loop.depth < 9 }}{% endfor %}",
    "output": "{% for a in range(99999) %}" + LONG + "{% endfor %}",
    "output in a macro": "{% macro m() %}{% for a in range(99999) %}"
    + "x" * 10_000
    + "{% endfor %}{% endmacro %}{{ m() }}",
    "output in a set": "{% set x %}{% for a in range(99999) %}" + LONG + "{% endfor %}{% endset %}",
    "output in a filter": "{% filter upper %}{% for a in range(99999) %}"
    + "x" * 10_000
    + "{% endfor %}{% endfilter %}",
    "center": "{{ 'x' | center(10**9) }}",
    "str.center": "{{ 'x'.center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "expandtabs by name": "{{ '\\t'.expandtabs(tabsize=10**9) }}",
    "rsplit by name": "{{ ('a' * 500000).rsplit(maxsplit=1, sep='b' + 'a' * 250000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent name": "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "many percents": "{{ ('%s' * 99999) % ((('x' * 9999,) * 99) * 1010) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 10**9) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format fields": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "join": "{{ ('x' * 99999).join('a' * 99999) }}",
    "join filter": "{{ ('a' * 99999) | join('x' * 99999) }}",
    "join attribute": "{% set n = namespace(x='x' * 99999) %}{{ ([n] * 9999) | join(attribute='x') }}",
    "indent": "{{ ('a\\n' * 99999) | indent('x' * 99999) }}",
    "indent width": "{{ 'a\\nb' | indent(10**9) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "sum": "{{ ([[1] * 99] * 999) | sum(start=[]) }}" * 300,
    "map": "{{ range(99999) | map('string') | map('center', 99999) | list }}",
    "tojson": "{{ [1] | tojson(indent=10**9) }}",
    "tojson separators": "{{ ([1] * 9999) | tojson(separators=['x' * 99999, ':']) }}" * 100,
    "rfind": "{{ ('a' * 500000).rfind('b' + 'a' * 250000) }}",
    "strip": "{{ ('a' * 900000).strip('b' * 900000 ~ 'a') }}",
    "trim filter": "{{ ('a' * 900000) | trim('b' * 900000 ~ 'a') }}",
    "equal hashes": "{{ dict.fromkeys(range(0, 99000 * (2**61 - 1), 2**61 - 1)) }}",
    "equal hashes in pairs": "{{ dict(range(0, 70000 * (2**61 - 1), 2**61 - 1) | batch(2) | list) }}",
    "many comparisons": "{% set a = [1] * 60000 %}{% set b = a + [] %}" + "{{ a == b }}" * 9000,
    "many tests": "{% set a = [1] * 60000 %}{% set b = a + [] %}" + "{{ a is eq b }}" * 8000,
    "many variables": "".join(f"{{% set v{i} = 'x' * 1000000 %}}" for i in range(4000)),
    "many slices": "{% set x = 'x' * 1000000 %}" + "".join(f"{{% set v{i} = x[1:] %}}" for i in range(4000)),
    "date": "{{ strftime_now('%Y' * 99999) }}",
    "int": "{{ ('9' * 500000) | int }}" * 2 + "{{ ('z' * 500000) | int(base=32) }}",
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_bomb_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds of this thread, so that other work on the machine does not count."""
    monkeypatch.setattr(meter, "CPU_LIMIT_S", LIMIT_S)
    template = ChatTemplate(BOMBS[name], SPECIAL)
    start = time.thread_time()
    try:
        text = template.render(MESSAGES, now=NOW)
    except TemplateError as err:
        assert str(err)  # noqa: PT017 - refusing is one of two good outcomes
    else:
        assert len(text) < 2 << 20
    assert time.thread_time() - start < 1.5 + LIMIT_S


def test_long_conversations_have_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than they take, and a bomb has no more than the longest."""
    monkeypatch.setattr(meter, "CPU_LIMIT_S", 0.001)
    template = ChatTemplate("{% for m in messages %}{{ m.role + m.content | trim }}{% endfor %}", SPECIAL)
    assert len(template.render(MESSAGES * 5000, now=NOW)) > 5000
    monkeypatch.setattr(meter, "LONGEST_S", 0.001)
    with pytest.raises(TemplateError, match=r"runs for more than 0\.001 s"):
        template.render(MESSAGES * 5000, now=NOW)


def test_bombs_take_no_memory_worth_mention() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("many variables", "many slices", "laughs", "output in a macro", "string times"):
        with pytest.raises(TemplateError):
            ChatTemplate(BOMBS[name], SPECIAL).render(MESSAGES, now=NOW)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 1 << 30


def test_threads_render_apart() -> None:
    """Each rendering has its own meter: one that is stopped does not stop the others."""
    good, bad = ChatTemplate("{{ messages[0].content }}", SPECIAL), ChatTemplate(BOMBS["macro fan"], SPECIAL)
    expected = good.render(MESSAGES, now=NOW)
    wrong: list[str] = []

    def work(template: ChatTemplate, times: int) -> None:
        for _ in range(times):
            try:
                if template.render(MESSAGES, now=NOW) != expected:
                    wrong.append("another text")
            except TemplateError as err:
                if template is good:
                    wrong.append(str(err))

    threads = [threading.Thread(target=work, args=(t, n)) for t, n in ((good, 300), (bad, 1), (good, 300))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
