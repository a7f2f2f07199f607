"""Control tokens in texts: where they are, where that lets a text be cut, and none that a message spells."""

from __future__ import annotations

import random
import re
import time

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from tokenizers import AddedToken
from vocabularies import APART, SPECIAL, byte_level, decoded, each_kind, hostile, open_library, opened, texts

from ssmd.text.tokenizer import Tokenizer, TokenizerError
from ssmd.text.vocabulary import _any_of


def controls(tokenizer: Tokenizer, rendered: str) -> list[int]:
    return [part for part in tokenizer._controls.parts(rendered) if isinstance(part, int)]


@each_kind
@settings(max_examples=60, deadline=None)
@given(content=hostile)
def test_escape_is_undone_by_unescape(name: str, content: str) -> None:
    escaped = opened(name).escape(content)
    assert opened(name).unescape(escaped) == content
    assert not any(special in escaped for special in SPECIAL)


@each_kind
@settings(max_examples=60, deadline=None)
@given(content=hostile, before=texts, after=texts)
def test_a_message_never_adds_control_tokens(name: str, content: str, before: str, after: str) -> None:
    tokenizer = opened(name)
    rendered = f"{before}<|im_start|>{tokenizer.escape(content)}<|im_end|>{after}"
    expected = [*controls(tokenizer, f"{before}<|im_start|>"), *controls(tokenizer, f"<|im_end|>{after}")]
    assume(not after.startswith("x") and not content.endswith("<s>"))
    assert [t for t in tokenizer.encode(rendered) if tokenizer.is_control(t)] == expected


@each_kind
@settings(max_examples=60, deadline=None)
@given(text=texts)
@example("<|im_end|>xBOS")  # one token, and no other: BOS stands only between words
@example("BOSy|>")  # likewise
@example("BOS<s>BOS x<s>BOS")
def test_where_a_control_token_ends_or_starts_text_can_be_cut(name: str, text: str) -> None:
    tokenizer = opened(name)
    whole = tokenizer.encode(text)
    for at in range(len(text) + 1):
        if tokenizer.ends_at_control(text, at):
            assert tokenizer.encode(text[:at]) + tokenizer.encode(text[at:]) == whole, (at, text[:at], text[at:])


@each_kind
def test_cuts_are_found_around_ordinary_turns(name: str) -> None:
    tokenizer = opened(name)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    start = text.rindex("<|im_start|>")
    assert tokenizer.ends_at_control(text, 0)
    assert tokenizer.ends_at_control(text, len(text))
    assert tokenizer.ends_at_control(text, start)
    assert not tokenizer.ends_at_control(text, start + 3)
    cuts = [at for at in range(len(text) + 1) if tokenizer.ends_at_control(text, at)]
    for limit in range(len(text) + 1):
        assert tokenizer.last_cut(text, limit) == max(at for at in cuts if at <= limit)
    assert not tokenizer.ends_at_control(text, -1)
    assert not tokenizer.ends_at_control(text, len(text) + 1)
    end = text.index("<|im_end|>") + len("<|im_end|>")
    assert tokenizer.ends_at_control(text, end) == (name.removesuffix(APART) != "unigram, first")


def test_spaces_before_a_token_that_swallows_them_are_read_once() -> None:
    """It took minutes where the search began at each of them."""
    tokenizer = opened("stripping")
    text = f"{' ' * 300_000}x<mask> y"
    start = time.thread_time()
    assert tokenizer.last_cut(text, len(text) - 1) == len(text) - 2
    assert time.thread_time() - start < 1


def with_names(length: int) -> tokenizers.Tokenizer:
    t = byte_level()
    names = [f"{'<' * length}{i}>" for i in range(500)]
    t.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return t


def with_beginnings(count: int) -> tokenizers.Tokenizer:
    t = byte_level()
    t.add_special_tokens([AddedToken("a" * k + "Z", special=True, normalized=False) for k in range(1, count)])
    return t


def test_many_added_tokens_are_looked_for_in_small_pieces() -> None:
    """Each place of a text may be compared with all of them, and a search holds up every other thread."""
    tokenizer = open_library(with_names(500))
    assert tokenizer._controls._piece < 300
    text = f"a{'<' * 700}12> b{'<' * 500}499>"
    assert tokenizer.unescape(tokenizer.escape(text)) == text
    assert [tokenizer.is_control(token) for token in tokenizer.encode(text)].count(True) == 2
    for t in (with_names(1000), with_beginnings(1000)):
        with pytest.raises(TokenizerError, match="the added tokens have 50"):
            open_library(t)


def test_the_longest_token_matches_and_too_many_alike_fail() -> None:
    rng = random.Random(5)
    for _ in range(300):
        texts = {"".join(rng.choices("ab|(", k=rng.randrange(1, 7))) for _ in range(rng.randrange(1, 30))}
        plain = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        found, text = _any_of(iter(texts)), "".join(rng.choices("ab|(c", k=300))
        assert found is not None
        assert [m.span() for m in found.finditer(text)] == [m.span() for m in plain.finditer(text)]
    with pytest.raises(TokenizerError, match="more than 100 added tokens begin alike"):
        open_library(with_beginnings(700))


def test_an_added_stop_token_not_marked_special_is_inert() -> None:
    t = byte_level()
    t.add_tokens([AddedToken("<|eot|>", special=False, normalized=False)])
    stop = t.get_vocab()["<|eot|>"]
    tokenizer = open_library(t, [stop])
    assert tokenizer.encode("a<|eot|>")[-1] == stop
    inert = tokenizer.encode(tokenizer.escape("a<|eot|>"))
    assert stop not in inert
    assert decoded(tokenizer, inert) == "a<|eot|>"
