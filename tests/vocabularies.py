"""Tokenizers of every kind in use, made here, and texts that tell them apart."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from ssmd.model.artifact import SpecialTokens
from ssmd.text.apart import open_texts
from ssmd.text.tokenizer import Detokenizer, Tokenizer
from ssmd.text.vocabulary import FIRST_SENTINEL, FRAME, QUOTE

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
