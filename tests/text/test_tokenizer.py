"""The tokenizer against the library itself, on byte-level and SentencePiece-like vocabularies made here."""

from __future__ import annotations

import itertools
import json
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from ssmd.model.artifact import SpecialTokens
from ssmd.text import cutting
from ssmd.text import tokenizer as tokenizer_module
from ssmd.text.apart import open_texts
from ssmd.text.decoding import BYTE_OF
from ssmd.text.detokenizer import Detokenizer
from ssmd.text.tokenizer import FIRST_SENTINEL, FRAME, QUOTE, Tokenizer, TokenizerError, _any_of

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "user system assistant im_start im_end <|im_end|> think </think>",
    "Grüße, größer – ‘quoted’ naïve café 日本語のテキスト 👍👍🏽 \n\n\tdef f(x):\n    return x\n",
] * 20
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im_end|>x", "<s>"]


def with_added(t: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    t.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    t.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("<think>", special=False)])
    t.add_tokens([AddedToken("<s><tool>", special=False, normalized=False)])
    return t


def byte_level(prefix_space: bool = False) -> tokenizers.Tokenizer:
    t = tokenizers.Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)]
    )
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    t.train_from_iterator(CORPUS, trainer)
    return with_added(t)


# Of Qwen 2 and 3; Llama 3 takes up to three digits at once.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split_by(pattern: str, special: Callable[[tokenizers.Tokenizer], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    t = tokenizers.Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    t.train_from_iterator(CORPUS, trainer)
    return special(t)


def unigram(scheme: str) -> tokenizers.Tokenizer:
    pieces = sorted({c for line in CORPUS for c in line if not c.isspace()} | set("▁\n"))
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("<|im_end|>", 0.0)]
    vocab += [(p, -5.0) for p in pieces] + [(p, -3.0) for p in ("▁the", "▁quick", "er", "in", "▁a", "▁▁")]
    t = tokenizers.Tokenizer(models.Unigram(vocab, 0, byte_fallback=False))
    t.normalizer = normalizers.Sequence([normalizers.NFKC()])
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    t.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return with_added(t)


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: spaces replaced by a normalizer, unknown characters by bytes."""
    letters = sorted({c for line in CORPUS for c in line if c.isascii() and not c.isspace()} | {"▁", "ü"})
    names = ["<unk>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *letters, "th", "▁th", "▁the"]
    vocab = {name: i for i, name in enumerate(names)}
    t = tokenizers.Tokenizer(
        models.BPE(vocab, [("t", "h"), ("▁", "th"), ("▁th", "e")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_added(t)


def stripping() -> tokenizers.Tokenizer:
    """Control tokens that swallow spaces (Phi-3's do) or stand only between words."""
    t = byte_level()
    t.add_special_tokens(
        [
            AddedToken("<|end|>", rstrip=True, special=True, normalized=False),
            AddedToken("<mask>", lstrip=True, special=True, normalized=False),
            AddedToken("BOS", single_word=True, special=True, normalized=False),
            AddedToken("y|>", special=True, normalized=False),
        ]
    )
    return t


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, prefix space": lambda: byte_level(prefix_space=True),
    "unigram, first": lambda: unigram("first"),
    "unigram, always": lambda: unigram("always"),
    "unigram, never": lambda: unigram("never"),
    "byte fallback": byte_fallback,
    "stripping": stripping,
    "qwen": lambda: split_by(QWEN, with_added),
    "llama": lambda: split_by(LLAMA, with_added),
}


@cache
def library(name: str) -> tokenizers.Tokenizer:
    return MAKERS[name.removesuffix(APART)]()


APART = ", apart"  # a tokenizer that reads in a process of its own


@cache
def opened(name: str) -> Tokenizer:
    return open_library(library(name), apart=name.endswith(APART))


def open_library(made: tokenizers.Tokenizer, stop_tokens: Sequence[int] = (), *, apart: bool = False) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        made.save(str(path))
        if apart:
            return open_texts(path, stop_tokens, "", SpecialTokens()).tokenizer
        return Tokenizer.open(path, stop_tokens=stop_tokens)


def decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = Detokenizer(tokenizer)
    return "".join([*map(stream.push, ids), stream.flush()])


each_kind = pytest.mark.parametrize("name", [*sorted(MAKERS), f"stripping{APART}", f"unigram, first{APART}"])


def id_of(name: str, text: str) -> int:
    token = library(name).token_to_id(text)
    assert token is not None
    return int(token)


texts = st.lists(
    st.one_of(
        st.sampled_from(
            [*SPECIAL, "<tool>", "<think>", "<|end|>", "<mask>", "BOS", "y|>", "<s", ">", " ", "  ", "\n", "x", "▁"]
        ),
        st.text("abthe ü日👍\n<|>_", max_size=6),
        st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=4),
    ),
    max_size=12,
).map("".join)
hostile = st.lists(
    st.one_of(
        texts,
        st.sampled_from(
            [chr(FIRST_SENTINEL), chr(FIRST_SENTINEL + 1), QUOTE, FRAME, "＜s＞", "<|im_" + QUOTE, "<|im_end|>"]
        ),
    ),
    max_size=6,
).map("".join)


@each_kind
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_encode_equals_the_librarys_where_nothing_is_escaped(name: str, text: str) -> None:
    expected = library(name).encode(text, add_special_tokens=False)
    # NFKC makes "<s>" of a wide "＜s＞", which the library then takes for a control token: ssmd does not.
    controls = sum(token in _special_ids(name) for token in expected.ids)
    assume(controls == sum(1 for _ in opened(name)._control_matches(text)))
    assert opened(name).encode(text) == expected.ids


@contextmanager
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (cutting, tokenizer_module):
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
    with small_pieces():
        assert one.escape(whole) == "".join(one._sentinel_of.get(m, m) for m in _escaped_parts(one, whole))
        assert one.encode(whole) == expected
        assert one.encode(one.escape(whole)) == escaped
        assert one.unescape(one.escape(whole)) == whole


def _escaped_parts(one: Tokenizer, text: str) -> Iterator[str]:
    at = 0
    for found in one._to_escape.finditer(text):
        yield text[at : found.start()]
        yield found[0] if found[0] in one._sentinel_of else QUOTE + found[0]
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
    expected = [t for _, _, t in tokenizer._control_matches(f"{before}<|im_start|>")]
    expected += [t for _, _, t in tokenizer._control_matches(f"<|im_end|>{after}")]
    assume(not after.startswith("x") and not content.endswith("<s>"))
    assert [t for t in tokenizer.encode(rendered) if tokenizer.is_control(t)] == expected


@settings(max_examples=60, deadline=None)
@given(content=hostile)
def test_escaped_text_comes_back_as_it_was(content: str) -> None:
    name = "byte-level"
    tokenizer = opened(name)
    ids = tokenizer.encode("<|im_start|>" + tokenizer.escape(content) + "<|im_end|>")
    assert decoded(tokenizer, ids) == content
    assert b"".join(tokenizer.token_bytes(t) for t in ids[1:-1]) == content.encode()


@each_kind
def test_escaped_text_is_encoded_as_the_library_encodes_plain_text(name: str) -> None:
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
def test_any_ids_of_a_byte_level_vocabulary_decode_as_the_library_does(data: st.DataObject) -> None:
    name = "byte-level"
    tokenizer = opened(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary - 1), max_size=30))
    assert decoded(tokenizer, ids) == library(name).decode(ids, skip_special_tokens=True)


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


def test_many_added_tokens_are_looked_for_in_small_pieces() -> None:
    """Each place of a text may be compared with all of them, and a search holds up every other thread."""
    tokenizer = open_library(with_names(500))
    assert tokenizer._piece < 300
    text = f"a{'<' * 700}12> b{'<' * 500}499>"
    assert tokenizer.unescape(tokenizer.escape(text)) == text
    assert [tokenizer.is_control(token) for token in tokenizer.encode(text)].count(True) == 2
    with pytest.raises(TokenizerError, match="the added tokens have 50"):
        open_library(with_names(1000))


def test_the_longest_of_many_that_begin_alike_is_found_and_too_many_are_refused() -> None:
    rng = random.Random(5)
    for _ in range(300):
        texts = {"".join(rng.choices("ab|(", k=rng.randrange(1, 7))) for _ in range(rng.randrange(1, 30))}
        plain = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        found, text = _any_of(iter(texts)), "".join(rng.choices("ab|(c", k=300))
        assert found is not None
        assert [m.span() for m in found.finditer(text)] == [m.span() for m in plain.finditer(text)]
    t = byte_level()
    t.add_special_tokens([AddedToken("a" * k + "Z", special=True, normalized=False) for k in range(1, 700)])
    with pytest.raises(TokenizerError, match="more than 100 added tokens begin alike"):
        open_library(t)


def test_what_makes_one_token_costly_to_show_is_refused() -> None:
    long = byte_level()
    long.add_tokens([AddedToken("a" * 5000, special=False, normalized=False)])
    with pytest.raises(TokenizerError, match="a token of 5000 characters, at most 4096"):
        open_library(long)
    steps = byte_level()
    steps.decoder = decoders.Sequence([decoders.Replace("b", "c")] * 33)
    with pytest.raises(TokenizerError, match="a decoder of 33 steps, of which 32"):
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


def test_an_added_stop_token_that_is_not_marked_special_is_inert_in_messages() -> None:
    t = byte_level()
    t.add_tokens([AddedToken("<|eot|>", special=False, normalized=False)])
    stop = t.get_vocab()["<|eot|>"]
    tokenizer = open_library(t, [stop])
    assert tokenizer.encode("a<|eot|>")[-1] == stop
    inert = tokenizer.encode(tokenizer.escape("a<|eot|>"))
    assert stop not in inert
    assert decoded(tokenizer, inert) == "a<|eot|>"


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
