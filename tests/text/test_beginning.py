"""Tokens that a tokenizer puts before every text, and how a raw prompt is read and continued."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from vocabularies import byte_level, each_kind, open_library, opened, texts

from ssmd.text.beginning import read_beginning
from ssmd.text.tokenizer import Detokenizer
from ssmd.text.vocabulary import FIRST_SENTINEL, FRAME, QUOTE

RESERVED = (chr(FIRST_SENTINEL), chr(FIRST_SENTINEL + 1), QUOTE, FRAME)


def template(single: str, *names: str) -> processors.TemplateProcessing:
    known = byte_level()
    return processors.TemplateProcessing(single=single, special_tokens=[(n, known.token_to_id(n)) for n in names])


@pytest.mark.parametrize(
    ("processor", "names"),
    [
        (None, []),
        (processors.ByteLevel(), []),
        (template("$A"), []),
        (template("<s> $A", "<s>"), ["<s>"]),
        (template("<s> $A <|im_end|>", "<s>", "<|im_end|>"), ["<s>"]),
        (template("$A <|im_end|>", "<|im_end|>"), []),
        (processors.Sequence([processors.ByteLevel(), template("<s> $A", "<s>")]), ["<s>"]),
    ],
)
def test_what_stands_before_every_text(processor: processors.PostProcessor | None, names: list[str]) -> None:
    one = byte_level()
    if processor is not None:
        one.post_processor = processor
    expected = tuple(one.token_to_id(name) for name in names)
    assert open_library(one).beginning == expected
    if processor is not None:
        assert tuple(library_ids(processor)[: len(expected)]) == expected


def library_ids(processor: processors.PostProcessor) -> list[int]:
    """Return the library's own ids of a text."""
    one = byte_level()
    one.post_processor = processor
    ids: list[int] = one.encode("x").ids
    return ids


@pytest.mark.parametrize(
    "state", [None, b"", b"x", b"[]", b"1", b'{"type": "Sequence"}', b'{"type": "BertProcessing"}']
)
def test_other_processors_put_nothing(state: bytes | None) -> None:
    assert read_beginning(state) == ()


def test_no_more_than_a_few() -> None:
    piece = {"SpecialToken": {"id": "<s>"}}
    state = {"type": "TemplateProcessing", "single": [piece] * 100, "special_tokens": {"<s>": {"ids": [1] * 100}}}
    assert read_beginning(json.dumps(state).encode()) == (1,) * 16


@each_kind
@settings(max_examples=40, deadline=None)
@given(text=texts, marks=st.lists(st.sampled_from(RESERVED), max_size=3))
def test_a_quoted_text_is_read_as_the_library_reads_it(name: str, text: str, marks: list[str]) -> None:
    """Its control tokens count, and the characters that ssmd itself uses are no more than characters."""
    one = opened(name)
    text += "".join(marks)
    parts = list(one._controls.parts(one.quote(text)))
    said = "".join(part if isinstance(part, str) else one._special[part] for part in parts)
    assert said == text
    if not any(mark in text for mark in RESERVED):
        assert one.quote(text) == text


@pytest.mark.parametrize("name", ["unigram, first", "byte-level"])
def test_what_goes_on_keeps_its_first_space(name: str) -> None:
    one = opened(name)
    later = next(token for token in range(one.vocabulary) if one.token_bytes(token).startswith(b" t"))
    text = one.token_bytes(later).decode()
    assert Detokenizer(one, begun=True).push(later) == text
    assert Detokenizer(one).push(later) == (text if name == "byte-level" else text[1:])
