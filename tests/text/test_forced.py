"""Grammars of forced calls, followed by llguidance: what they let pass is read as calls whose arguments are valid."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from reading import read
from tokenizers import AddedToken, Tokenizer

from ssmd.text.calls.forced import forced
from ssmd.text.calls.formats import FORMATS, HERMES, LFM2, LLAMA_3, Format

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", 'Q"x']}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "n"],
}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@cache
def vocabulary(special: tuple[str, ...]) -> tuple[LLTokenizer, Tokenizer]:
    """The tiny model's tokenizer, with these control tokens beside its own."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    tiny.write_tokenizer(folder)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return LLTokenizer(made.to_str(), eos_token=2), made


def said(format_: Format, seed: int, *, controls: bool, several: bool = False, thought: str | None = None) -> list[str]:
    """An answer drawn at random from what a grammar allows: its pieces, control tokens apart."""
    known, made = vocabulary(format_.markers if controls else ())
    ids: dict[str, int] = {m: made.token_to_id(m) or 0 for m in format_.markers} if controls else {}
    text = forced(format_, TOOLS, several=several, thought=thought, controls=ids)
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(text))
    assert not matcher.is_error(), matcher.get_error()
    drawn, mask = random.Random(seed), allocate_token_bitmask(1, known.vocab_size)
    pieces: list[str] = []
    names = {token: marker for marker, token in ids.items()}
    for _ in range(2000):
        if matcher.is_accepting() and (matcher.is_stopped() or drawn.random() < 0.5):
            return pieces
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: known.vocab_size])
        token = int(drawn.choice([t for t in allowed if t != 2]))
        assert matcher.consume_token(token)
        pieces.append(names.get(token) or known.decode_bytes([token]).decode())
    raise AssertionError("it does not end")


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("controls", [False, True])
def test_whatever_is_drawn_is_calls_that_are_valid(format_: Format, controls: bool) -> None:
    for seed in range(6):
        pieces = said(format_, seed, controls=controls, several=seed > 2)
        found = read(format_, pieces, format_.markers if controls else (), tools=SCHEMAS)
        assert found.said == ""
        assert found.calls
        for name, arguments, whole in found.calls:
            assert whole
            given = json.loads(arguments)
            if name == "f":
                assert given == {}
            else:
                assert set(given) == {"city", "n"}
                assert given["city"] in ("Paris", 'Q"x')
                assert 0 <= given["n"] <= 9


@pytest.mark.parametrize("format_", [HERMES, LLAMA_3], ids=lambda f: f.name)
def test_calls_are_written_as_templates_write_them(format_: Format) -> None:
    known, _ = vocabulary(())
    matcher = LLMatcher(
        known, LLMatcher.grammar_from_lark(forced(format_, TOOLS, several=True, thought=None, controls={}))
    )
    arguments = '{"city": "Paris", "n": 3}'
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    text = f"{call}\n{call}" if format_ is HERMES else f'{{"name": "get_weather", "parameters": {arguments}}}'
    ids = known.tokenize_str(text)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("thought", "text", "passes"),
    [
        (None, "<think>x</think>", False),
        ("<think>", "<think>x < y\n</think>\n\n", True),
        ("<think>", "", True),
        ("", "x < y\n</think>\n\n", True),
        ("", "", False),
    ],
)
def test_reasoning_may_stand_before_them(thought: str | None, text: str, passes: bool) -> None:
    known, _ = vocabulary(())
    grammar = forced(HERMES, TOOLS, several=False, thought=thought, controls={})
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar))
    ids = known.tokenize_str(text + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is passes


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f.name)
def test_behind_a_marker_stands_the_rest_of_its_calls(format_: Format) -> None:
    known, _ = vocabulary(())
    written, arguments = format_.written, '{"city": "Paris", "n": 3}'
    if format_.tagged:
        arguments = "<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    call = f"{written.before}get_weather{written.middle}{arguments}{written.after}"
    whole = f"{written.opening}{call}{written.closing}"
    behind = whole.removeprefix(format_.openings[0])
    for text in (behind, behind.lstrip(), f"\n{behind.lstrip()}", behind.replace("3", "10"), f"x{behind}"):
        grammar = forced(format_, TOOLS, several=True, thought=None, controls={}, begun=True)
        matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar))
        ids = known.tokenize_str(text)
        passes = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert passes is (text.strip() == behind.strip()), text


def test_names_cannot_leave_their_place() -> None:
    tools = ({"type": "function", "function": {"name": 'a" | /.*/\n"<tool_call>'}},)
    for format_ in FORMATS:
        grammar = forced(format_, tools, several=True, thought=None, controls={"<tool_call>": 7})
        assert "| /" not in grammar.replace('\\" | /', "")
    assert forced(LFM2, TOOLS, several=False, thought=None, controls={"<|tool_call_start|>": 7}).startswith(
        'start: <[7]> "[" call'
    )
