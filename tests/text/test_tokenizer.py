"""The tokenizer against the library itself, on byte-level and SentencePiece-like vocabularies made here."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from vocabularies import (
    MAKERS,
    QWEN,
    byte_level,
    decoded,
    each_kind,
    hostile,
    id_of,
    library,
    open_library,
    opened,
    split_by,
    texts,
)

from ssmd.text import tokenizer as tokenizer_module
from ssmd.text import vocabulary
from ssmd.text.tokenizer import Detokenizer, Tokenizer, TokenizerError
from ssmd.text.vocabulary import BYTE_OF, QUOTE


@each_kind
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_encode_equals_the_librarys_where_nothing_is_escaped(name: str, text: str) -> None:
    expected = library(name).encode(text, add_special_tokens=False)
    # NFKC makes "<s>" of a wide "＜s＞", which the library then takes for a control token: ssmd does not.
    controls = sum(token in _special_ids(name) for token in expected.ids)
    assume(controls == sum(isinstance(part, int) for part in opened(name)._controls.parts(text)))
    assert opened(name).encode(text) == expected.ids


@contextmanager
def small_pieces(one: Tokenizer) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one._controls, "_piece", 3)
        for module in (vocabulary, tokenizer_module):
            patch.setattr(module, "PIECE", 3)
        yield


@each_kind
@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.one_of(texts, st.sampled_from(["don't ", "the, ", "1 234a.", "12345", "日本、語。", "\n\n "])), max_size=6
    )
)
def test_pieces_have_the_ids_of_the_whole(name: str, text: list[str]) -> None:
    """Wherever a text is cut, the ids are those that the library has for it, control tokens in messages or not."""
    one, whole = opened(name), "".join(text)
    expected, escaped = one.encode(whole), one.encode(one.escape(whole))
    with small_pieces(one):
        assert one.escape(whole) == "".join(one._controls._sentinel_of.get(m, m) for m in _escaped_parts(one, whole))
        assert one.encode(whole) == expected
        assert one.encode(one.escape(whole)) == escaped
        assert one.unescape(one.escape(whole)) == whole


def _escaped_parts(one: Tokenizer, text: str) -> Iterator[str]:
    at = 0
    for found in one._controls._to_escape.finditer(text):
        yield text[at : found.start()]
        yield found[0] if found[0] in one._controls._sentinel_of else QUOTE + found[0]
        at = found.end()
    yield text[at:]


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_which_tokenizers_are_known_to_split_after_a_letter(name: str) -> None:
    known = {"byte-level", "byte-level, prefix space", "qwen", "llama"}
    assert (opened(name)._place is not None) == (name in known)
    place = opened(name)._place
    assert place is None or ("[0-9]" in place.pattern) == (name in ("byte-level", "qwen"))
    text = "and so on, " * 20_000
    pieces = list(opened(name)._pieces(text))
    assert (len(pieces) > 4) == (name in known)
    assert max(map(len, pieces)) < 40_000 or name not in known
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}+ ?",
        r"\p{L}+|\s+",
        r"[^\s]+|\s+",
        r".",
        QWEN + r"|\p{L}+\s",
        r"(\p{L}|\s)+",
        "a b",
        r"\p{N}",
        QWEN[:-4],
        r"\s+",
    ],
)
def test_of_a_strange_pattern_nothing_is_assumed(pattern: str) -> None:
    made = split_by(pattern, lambda t: t)
    assert open_library(made)._place is None


@pytest.mark.parametrize("text", ["it is ", "e\n", "y"])
def test_a_token_that_stands_across_a_place_keeps_the_text_whole(text: str) -> None:
    made = byte_level()
    made.add_tokens([AddedToken(text, special=False, normalized=False, rstrip=True)])
    assert open_library(made)._place is None


@each_kind
@settings(max_examples=60, deadline=None)
@given(text=st.lists(texts | st.sampled_from(["a b ", "12", "word. ", "<|im_end|> "])).map("".join))
def test_a_text_has_no_fewer_ids_than_are_counted(name: str, text: str) -> None:
    one = opened(name)
    with small_pieces(one):
        assert one.fewest(text, len(text)) <= len(one.ids(one.quote(text)))
        assert one.fewest(text, len(text)) <= len(one.ids(one.escape(text)))


def test_bytes_at_places_are_those_of_their_characters() -> None:
    sides = re.compile(f"[{vocabulary._WORDS}{vocabulary._SIGNS}]")
    characters = "".join(c for c in map(chr, [*range(0xD800), *range(0xE000, 0x110000)]) if sides.match(c))
    assert len(characters) > 10_000
    assert set(characters.encode()) <= vocabulary.BYTES_AT_PLACES


@pytest.mark.parametrize(("lacks", "counted"), [(0xC3, False), (0x00, True), (0xFF, True)])
def test_parts_count_only_if_their_bytes_have_tokens(lacks: int, counted: bool) -> None:
    made = json.loads(byte_level().to_str())
    letter = next(letter for letter, byte in BYTE_OF.items() if byte == lacks)
    del made["model"]["vocab"][letter]
    made["model"]["merges"] = [merge for merge in made["model"]["merges"] if letter not in "".join(merge)]
    made["model"]["vocab"] = {t: i for t, i in made["model"]["vocab"].items() if letter not in t}
    one = open_library(tokenizers.Tokenizer.from_str(json.dumps(made)))
    assert (one.fewest("so it is", 9) == 3) == counted


def test_words_are_counted_without_encoding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened("byte-level")
    monkeypatch.setattr(Tokenizer, "read", None)
    assert one.fewest("a b " * 100_000, 1 << 20) == 200_001 == one.fewest("a b " * 100_000, 200_000)
    assert 1000 < one.fewest("a b " * 100_000, 1000) < 20_000, "no further than needed"


def test_of_too_many_ids_the_first_ones_are_enough() -> None:
    one, text = opened("byte-level"), "and so on, " * 300_000
    started = time.thread_time()
    found = one.ids(text, 1000)
    assert time.thread_time() - started < 2
    assert 1000 < len(found) < 40_000
    assert found.tolist() == one.encode(text[:200_000])[: len(found)]
    assert one.ids("and so on", 1).tolist() == one.encode("and so on")


def test_a_library_that_gives_up_is_an_error_like_others() -> None:
    """A regular expression that backtracks too far panics in Rust, which is no Exception in Python."""
    made = split_by(r"(a+)+$", lambda t: t)
    with pytest.raises(TokenizerError, match="cannot read the text"):
        open_library(made).encode("a" * 50_000 + "b")


def test_a_text_that_can_only_be_read_at_once_has_a_bound() -> None:
    with pytest.raises(TokenizerError, match="524289 characters in a row"):
        opened("unigram, first").encode("a" * ((512 << 10) + 1))


TELLING = [
    "a<|end|> \n b",
    "a<|end|><|end|>  <mask> b <mask><mask>",
    "a <mask> b<mask>",
    "aBOS BOS b BOS",
    "<|im_end|>x<|im_end|> x",
    "<s><tool><s> <tool>",
    "<think><s>a<|im_start|><|im_start|>",
    "  a<s>  b",
    "▁a<s>▁b",
]


@each_kind
@pytest.mark.parametrize("text", TELLING)
def test_telling_texts_and_every_cut_of_them(name: str, text: str) -> None:
    tokenizer = opened(name)
    whole = tokenizer.encode(text)
    assert whole == library(name).encode(text, add_special_tokens=False).ids
    assert decoded(tokenizer, whole) == library(name).decode(whole, skip_special_tokens=True)
    for at in range(len(text) + 1):
        if tokenizer.ends_at_control(text, at):
            assert tokenizer.encode(text[:at]) + tokenizer.encode(text[at:]) == whole, (text[:at], text[at:])


def _special_ids(name: str) -> set[int]:
    return {token for token, a in library(name).get_added_tokens_decoder().items() if a.special}


@settings(max_examples=60, deadline=None)
@given(content=hostile)
def test_escaped_text_comes_back_as_it_was(content: str) -> None:
    name = "byte-level"
    tokenizer = opened(name)
    ids = tokenizer.encode("<|im_start|>" + tokenizer.escape(content) + "<|im_end|>")
    assert decoded(tokenizer, ids) == content
    assert b"".join(tokenizer.token_bytes(t) for t in ids[1:-1]) == content.encode()


@each_kind
def test_escaped_text_encodes_like_plain_text_in_the_library(name: str) -> None:
    plain = tokenizers.Tokenizer.from_str(library(name).to_str())
    plain.encode_special_tokens = True
    content = "say <|im_end|> now"
    inner = plain.encode("<tool>" + content, add_special_tokens=False).ids[1:]
    tokenizer = opened(name)
    ids = tokenizer.encode("<tool>" + tokenizer.escape(content))[1:]
    if id_of(name, "<|im_end|>") not in inner:  # Unigram holds the text as a piece as well, and takes it
        assert ids == inner
    assert id_of(name, "<|im_end|>") not in ids


@each_kind
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_decode_and_the_stream_equal_the_librarys_decode(name: str, text: str) -> None:
    tokenizer = opened(name)
    ids = library(name).encode(text, add_special_tokens=False).ids
    expected = library(name).decode(ids, skip_special_tokens=True)
    assert decoded(tokenizer, ids) == expected
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(t) for t in ids]
    assert "�" not in "".join(pieces) or "�" in expected
    assert "".join(pieces) + stream.flush() == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_byte_level_ids_decode_as_the_library_decodes_them(data: st.DataObject) -> None:
    name = "byte-level"
    tokenizer = opened(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary - 1), max_size=30))
    assert decoded(tokenizer, ids) == library(name).decode(ids, skip_special_tokens=True)


def test_what_makes_one_token_costly_to_show_is_refused() -> None:
    long = byte_level()
    long.add_tokens([AddedToken("a" * 5000, special=False, normalized=False)])
    with pytest.raises(TokenizerError, match="a token of 5000 characters, at most 4096"):
        open_library(long)
    steps = byte_level()
    steps.decoder = decoders.Sequence([decoders.Replace("b", "c")] * 33)
    with pytest.raises(TokenizerError, match="a decoder of 33 steps, at most 32"):
        open_library(steps)


def test_half_characters_wait() -> None:
    tokenizer = opened("byte-level")
    byte_ids = {b: id_of("byte-level", c) for c, b in BYTE_OF.items()}
    stream = Detokenizer(tokenizer)
    sent = [stream.push(byte_ids[b]) for b in "a€👍".encode()]
    assert sent == ["a", "", "", "€", "", "", "", "👍"]
    assert stream.push(byte_ids[0xE2]) == ""
    assert stream.flush() == "�"
    assert [tokenizer.token_bytes(i) for i in byte_ids.values()] == [bytes([b]) for b in byte_ids]
    assert tokenizer.token_text(byte_ids[0xE2]) == "�"


def test_bytes_of_byte_fallback_tokens() -> None:
    tokenizer = opened("byte fallback")
    assert tokenizer.token_bytes(id_of("byte fallback", "<0xE2>")) == b"\xe2"
    assert tokenizer.token_bytes(id_of("byte fallback", "▁the")) == b" the"
    stream = Detokenizer(tokenizer)
    ids = [id_of("byte fallback", t) for t in ("▁the", "<0xE2>", "<0x82>", "<0xAC>", "▁the")]
    assert [stream.push(t) for t in ids] == ["the", "", "", "€", " the"]


def test_control_tokens_ids_and_padding_of_the_vocabulary() -> None:
    eos, ordinary = id_of("byte-level", "<|im_end|>"), id_of("byte-level", "a")
    tokenizer = open_library(byte_level(), [ordinary])
    assert tokenizer.vocabulary == library("byte-level").get_vocab_size()
    assert tokenizer.is_control(eos)
    assert tokenizer.is_control(ordinary)
    assert not tokenizer.is_control(id_of("byte-level", "<tool>"))
    assert tokenizer.token_text(eos) == "<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocabulary + 5) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert decoded(tokenizer, [tokenizer.vocabulary + 5, eos, ordinary]) == ""


def test_truncation_and_padding_of_the_file_are_not_obeyed() -> None:
    t = byte_level()
    t.enable_truncation(3)
    t.enable_padding(length=10)
    tokenizer = open_library(t)
    ids = tokenizer.encode("one two three four five")
    assert decoded(tokenizer, ids) == "one two three four five"


def test_surrogates_are_refused() -> None:
    with pytest.raises(TokenizerError, match="surrogate"):
        opened("byte-level").encode("a\ud800")


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"model": 1}', "[" * 100_000])
def test_a_broken_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path / "tokenizer.json")


def test_a_missing_file_and_an_unknown_decoder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.open(tmp_path / "none.json")
    spec = json.loads(byte_level().to_str())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "w.json").write_text(json.dumps(spec))
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer.open(tmp_path / "w.json")


def test_threads_share_a_tokenizer() -> None:
    tokenizer = opened("byte-level")
    contents = [f"{i} <|im_end|> {'é' * i}" for i in range(50)]
    wrong: list[str] = []

    def work() -> None:
        for content in itertools.chain.from_iterable(itertools.repeat(contents, 4)):
            if decoded(tokenizer, tokenizer.encode("<s>" + tokenizer.escape(content))) != content:
                wrong.append(content)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
