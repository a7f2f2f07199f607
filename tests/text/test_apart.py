"""A stranger's template and tokenizer in a process of their own: the same texts, and limits that end one job."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny
from strangers import GROWS, SLOW, TAKES_LONG, hostile, replacing
from text.test_template import CONVERSATIONS, NOW, TEMPLATES

from ssmd.machine import memory
from ssmd.machine.child import Child, ChildError, Packet
from ssmd.model.artifact import Artifact, SpecialTokens
from ssmd.text.apart import MEMORY, MODULE, TemplateApart, TextReader, Texts, open_texts, opened
from ssmd.text.messages import Message, ToolCall
from ssmd.text.template import ChatTemplate, TemplateError, TemplateInput
from ssmd.text.tokenizer import TokenizerError

SPECIAL = SpecialTokens(bos="<s>", eos="</s>")
LONGER = [
    *(Message("system", "Be brief."), Message("user", "Hi <b>&")),
    *(Message("assistant", "Yes?\n"), Message("user", "日本 👍"), Message("assistant", "So")),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return folder / "tokenizer.json"


def of(template: ChatTemplate | Any, what: str, *given: Any, **named: Any) -> Any:
    """Return a template's result, or the words of its refusal."""
    try:
        return getattr(template, what)(*given, now=NOW, **named)
    except TemplateError as err:
        return str(err)


TOOL = {"type": "function", "function": {"name": "add", "description": "“a”", "parameters": {"type": "object"}}}
KNOW_TOOLS = ("granite4", "hermes", "lfm2", "llama31", "mistral-tools", "qwen3")
CALLED = [
    Message("user", "1 + 2?"),
    Message("assistant", "", tool_calls=(ToolCall("abcdef123", "add", '{"a": 1.5, "ö": [null]}'),)),
    Message("tool", "3", tool_call_id="abcdef123"),
]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_text_is_the_one_of_this_process(name: str, vocabulary: Path) -> None:
    here = ChatTemplate(TEMPLATES[name], SPECIAL)
    with closing(open_texts(vocabulary, (), TEMPLATES[name], SPECIAL)) as texts:
        there = texts.template
        assert there.source == here.source
        for said in [*CONVERSATIONS.values(), LONGER, LONGER[:4], [Message("user", "half \ud800")]]:
            assert of(there, "render", said) == of(here, "render", said)
            assert of(there, "render", said, generate=False) == of(here, "render", said, generate=False)
            assert of(there, "render_settled", said) == of(here, "render_settled", said)
        found = of(here, "render_settled", LONGER[:4])
        if not isinstance(found, str) and (settled := found.settled) is not None:
            given = (LONGER[0], settled.messages, LONGER[settled.messages :])
            assert of(there, "render_after", *given) == of(here, "render_after", *given)
        tools = {"given": TemplateInput((TOOL,), {"enable_thinking": False, "x": "é"})}
        assert of(here, "render", CALLED, **tools) != of(here, "render", CALLED) or name not in KNOW_TOOLS
        for what in ("render", "render_settled"):
            assert of(there, what, CALLED, **tools) == of(here, what, CALLED, **tools)
        after = (CALLED[0], 1, CALLED[1:])
        assert of(there, "render_after", *after, **tools) == of(here, "render_after", *after, **tools)


@pytest.fixture(scope="module")
def plain(vocabulary: Path) -> Iterator[Texts]:
    texts = open_texts(vocabulary, (), "{{ messages[0].content }}", SPECIAL)
    yield texts
    texts.close()


def child_of(texts: Texts) -> Child:
    child: Child = texts.template._child  # type: ignore[attr-defined]
    return child


def test_a_killed_process_fails_one_job(plain: Texts) -> None:
    assert plain.template.render([Message("user", "a")], now=NOW) == "a"
    number = child_of(plain).process_id
    assert number is not None
    os.kill(number, signal.SIGKILL)
    time.sleep(0.05)
    assert plain.template.render([Message("user", "b")], now=NOW) == "b", "nobody was waiting for that one"
    ids = plain.tokenizer.encode("once more")
    number = child_of(plain).process_id
    assert number is not None
    os.kill(number, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (number, signal.SIGKILL)).start()
    with pytest.raises(TokenizerError, match="crashed \\(SIGKILL\\)"):
        plain.tokenizer.encode("once more")
    assert plain.tokenizer.encode("once more") == ids


def test_an_opened_anew_one_is_the_same_or_no_job_is_done(vocabulary: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(vocabulary, tmp_path / "tokenizer.json"))
    with closing(open_texts(path, (), "{{ messages[0].content }}", SPECIAL)) as texts:
        ids = texts.tokenizer.encode("as before")
        altered = json.loads(path.read_text())
        altered["added_tokens"].append({**altered["added_tokens"][0], "id": 999, "content": "<new>"})
        path.write_text(json.dumps(altered))
        number = child_of(texts).process_id
        assert number is not None
        os.kill(number, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(TokenizerError, match=r"cannot be opened again: .* was altered meanwhile"):
                texts.tokenizer.encode("as before")
            assert child_of(texts).process_id is None
        with pytest.raises(TemplateError, match="cannot be opened again"):
            texts.template.render([Message("user", "a")], now=NOW)
        shutil.copy(vocabulary, path)
        assert texts.tokenizer.encode("as before") == ids


ODD = """
import os, signal, sys, time
from ssmd.machine.child import Packet, receive, send
asked, answers = os.fdopen(0, "rb"), os.fdopen(1, "wb")
while (job := receive(asked, most=1 << 20)) is not None:
    with open(sys.argv[0] + ".jobs", "a") as noted:
        noted.write(job.head["do"] + chr(10))
    if job.head["do"] == "open":
        send(answers, Packet({}))
    elif job.head["do"] == "ends later":
        os.close(1)
        time.sleep(0.2)
        os._exit(7)
    elif job.head["do"] == "killed at once":
        os.kill(os.getpid(), signal.SIGKILL)
    elif job.head["do"] == "fails":
        os._exit(7)
    else:
        send(answers, Packet({}, bytes((255, 254, 0))))
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Child, Path]]:
    """A process that ends in many ways, and where it notes its jobs."""
    (tmp_path / "odd_child.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    child = Child("odd_child", 1 << 30, Packet({"do": "open"}), 5)
    child.open()
    yield child, tmp_path / "odd_child.py.jobs"
    child.close()


def test_who_was_killed_before_it_took_a_job_has_one_successor(odd: tuple[Child, Path]) -> None:
    child, jobs = odd
    with pytest.raises(ChildError, match="SIGKILL"):
        child.ask(Packet({"do": "killed at once"}), 5)
    assert jobs.read_text().splitlines() == ["open", "killed at once"] * 2, "once more, and no more"
    with pytest.raises(ChildError, match="exit code 7"):
        child.ask(Packet({"do": "fails"}), 5)
    assert jobs.read_text().splitlines()[4:] == ["open", "fails"]


def test_why_a_process_ended_is_what_it_says_itself(odd: tuple[Child, Path]) -> None:
    with pytest.raises(ChildError, match="exit code 7"):
        odd[0].ask(Packet({"do": "ends later"}), 5)


def test_what_is_no_text_and_no_ids_is_an_error(odd: tuple[Child, Path]) -> None:
    with pytest.raises(TemplateError, match="invalid UTF-8"):
        TemplateApart("", odd[0]).render([Message("user", "a")], now=NOW)
    with pytest.raises(TemplateError, match="invalid UTF-8"):
        TemplateApart("", odd[0]).render_settled([Message("user", "a")], now=NOW)
    with pytest.raises(TokenizerError, match="returned 3 bytes"):
        TextReader(odd[0])("a")


def test_jobs_take_turns(plain: Texts) -> None:
    """A long text is read in pieces: between two of them others are answered."""
    long, done = "and so on, " * 200_000, threading.Event()
    waits: list[float] = []

    def read() -> None:
        plain.tokenizer.ids(long)
        done.set()

    reader = threading.Thread(target=read)
    reader.start()
    started = time.monotonic()
    while not done.is_set():
        begin = time.monotonic()
        plain.template.render([Message("user", "a")], now=NOW)
        waits.append(time.monotonic() - begin)
    reader.join()
    assert len(waits) > 10
    assert sorted(waits)[len(waits) // 2] < (time.monotonic() - started) / 5


def test_the_child_ends_with_its_thread_and_can_be_ended_anytime(vocabulary: Path) -> None:
    texts = open_texts(vocabulary, (), "{{ messages[0].content }}", SPECIAL)
    number = child_of(texts).process_id
    assert number is not None
    os.kill(number, signal.SIGSTOP)
    threading.Timer(0.2, texts.close).start()
    with pytest.raises(TemplateError, match="it was ended"):
        texts.template.render([Message("user", "a")], now=NOW)
    with pytest.raises(TokenizerError, match="it was ended"):
        texts.tokenizer.encode("a")
    texts.close()
    assert not Path(f"/proc/{number}").exists() or Path(f"/proc/{number}/status").read_text().find("Z (zombie)") > 0


def opening(tokenizer: Path, source: str = "") -> Packet:
    fields = {"tokenizer": str(tokenizer), "stop_tokens": [], "nonce": "0" * 24, "special": SPECIAL.model_dump()}
    sha256 = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    return Packet({"do": "open", "sha256": sha256, **fields}, source.encode())


@pytest.mark.parametrize(("raw", "why"), [(b"\xff\xfe\0", "not valid UTF-8"), (b"", "more than the 131072 characters")])
@pytest.mark.parametrize("apart", [True, False])
def test_a_template_that_is_no_text_or_no_end_of_one(raw: bytes, why: str, apart: bool, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(raw)
    if not raw:
        os.truncate(tmp_path / "chat_template.jinja", 3 << 30)
    manifest = SimpleNamespace(stop_tokens=(), special_tokens=SPECIAL)
    made = cast(Artifact, SimpleNamespace(file=tmp_path.joinpath, manifest=manifest))
    before = memory.most_resident() or 0
    with pytest.raises(TemplateError, match=why):
        opened(made, apart=apart)
    assert (memory.most_resident() or 0) - before < 64 << 20


@pytest.mark.parametrize("apart", [True, False])
def test_a_byte_order_mark_before_a_template_is_left_out(apart: bool, vocabulary: Path) -> None:
    (vocabulary.parent / "chat_template.jinja").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    manifest = SimpleNamespace(stop_tokens=(), special_tokens=SPECIAL)
    texts = opened(cast(Artifact, SimpleNamespace(file=vocabulary.parent.joinpath, manifest=manifest)), apart=apart)
    with closing(texts):
        assert texts.template.render([Message("user", "Hi")], now=NOW) == "Hi"


def test_a_million_stop_tokens_are_refused(vocabulary: Path) -> None:
    with pytest.raises(TokenizerError, match="at most 4096 are allowed"):
        open_texts(vocabulary, range(1_000_000), "", SPECIAL)


@pytest.mark.parametrize("operator", ["<", pytest.param("~", marks=pytest.mark.full)])
def test_a_template_that_takes_long_to_compile_is_ended(vocabulary: Path, operator: str) -> None:
    source = "{{ " + operator.join(["a"] * 60_000) + " }}"
    child = Child(MODULE, MEMORY, opening(vocabulary, source), 1)
    with closing(child), pytest.raises(ChildError, match="more than 1 s of processor time"):
        child.open()


@pytest.mark.full  # as of a daemon, in tests/whole/test_strangers.py
def test_a_normalizer_that_makes_much_of_little_fails_one_text(vocabulary: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(hostile(vocabulary, replacing(*GROWS)))
    with closing(open_texts(path, (), "{{ messages }}", SPECIAL)) as texts:
        good = texts.tokenizer.encode("a good text")
        with pytest.raises(TokenizerError, match=r"more than 2\.1 GB of memory, or crashed"):
            texts.tokenizer.encode("boom")
        assert texts.tokenizer.encode("a good text") == good


def test_an_expression_that_takes_long_is_ended(vocabulary: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(hostile(vocabulary, replacing(TAKES_LONG)))
    with closing(Child(MODULE, MEMORY, opening(path), 30)) as child:
        child.open()
        with pytest.raises(ChildError, match="more than 1 s of processor time"):
            child.ask(Packet({"do": "read"}, (SLOW * 20_000).encode()), 1)
        assert len(child.ask(Packet({"do": "read"}, b"a"), 1).body) == 4


@pytest.mark.full  # as of a daemon
def test_a_hostile_tokenizer_is_refused_when_it_is_opened(vocabulary: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(hostile(vocabulary, replacing(*[({"String": "a"}, "a" * 1000)] * 3)))
    with pytest.raises(TokenizerError, match=r"cannot be opened: it took more than 2\.1 GB of memory, or crashed"):
        open_texts(path, (), "{{ messages }}", SPECIAL)


def test_the_clock_is_the_one_given(vocabulary: Path) -> None:
    with closing(open_texts(vocabulary, (), "{{ strftime_now('%Y %Z') }}", SPECIAL)) as texts:
        assert texts.template.render([], now=datetime(2031, 1, 1, tzinfo=UTC)) == "2031 UTC"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}{% if enable_thinking is defined %}{{ bos_token }}{% endif %}", None),
        ("{% set x = 1 %}{{ x }}{% for m in messages %}{{ m }}{{ loop.index }}{% endfor %}", {"messages"}),
        ("{% if y is not defined %}{% set y = 1 %}{% endif %}{{ y }}", {"y"}),
        ("{% macro f(a) %}{{ a }}{{ tools }}{% endmacro %}{{ f(1) }}", {"tools"}),
    ],
)
def test_the_names_that_a_template_looks_up(vocabulary: Path, source: str, expected: set[str] | None) -> None:
    found = ChatTemplate(source, SPECIAL).variables
    assert found == ({"messages", "enable_thinking", "bos_token"} if expected is None else expected)
    if expected is None:
        with closing(open_texts(vocabulary, (), source, SPECIAL)) as texts:
            assert texts.template.variables == found
