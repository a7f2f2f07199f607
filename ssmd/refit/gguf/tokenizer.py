"""The vocabulary in a GGUF file as a tokenizer.json: tokens, their types, merges and the pre-tokenizer by its name.

llama.cpp knows a pre-tokenizer by a name alone, `tokenizer.ggml.pre`. PRE has the names that models of the served
families have, with what the tokenizer.json of these models says. The file is written as JSON and not through the
`tokenizers` library: that reads untrusted vocabularies in a process of its own (ssmd/text/apart.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssmd.model.gguf import GGUF, shown
from ssmd.model.source import SPECIAL, SourceError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # enum llama_token_type
KEYS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # of tokenizer.ggml.*_token_id, by SPECIAL
# Control tokens that end an answer whatever the file says, as in llama_vocab::impl::load: eos alone is often not the
# end of a turn.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
SAMPLING = {  # general.sampling.*: generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def _byte_level(*, splits: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _pattern(digits: str) -> tuple[dict[str, Any], ...]:
    """Return the steps of Llama 3 and of those like it, which differ in how many digits stay together."""
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    return _split(f"{words}|{digits}|{rest}"), _byte_level(splits=False)


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer. steps: in order. nfc: text is normalized before. whole: a word that is a token needs no merges.

    bos: BOS stands before every text, unless the file says otherwise.
    """

    steps: tuple[dict[str, Any], ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True}, _byte_level(splits=True)))
_LLAMA3 = PreTokenizer(_pattern(r"\p{N}{1,3}"), whole=True, bos=True)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),  # SmolLM, Granite 3
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1", "falcon3", "pixtral"), _LLAMA3),
    "dbrx": PreTokenizer(_pattern(r"\p{N}{1,3}")),  # Granite 4
    "qwen2": PreTokenizer(_pattern(r"\p{N}"), nfc=True),  # Qwen 3 too
    "gpt-2": PreTokenizer((_byte_level(splits=True),)),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer((_byte_level(splits=True),), nfc=True)),  # GPT-NeoX: Mamba, Mamba-2
    "falcon": PreTokenizer(  # Falcon-Mamba
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            _byte_level(splits=True),
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        )
    ),
    "tekken": PreTokenizer((_split(_TEKKEN), _byte_level(splits=False)), whole=True, bos=True),  # Nemotron
}


@dataclass(frozen=True)
class Vocabulary:
    """A file's tokenizer and what belongs to it. special_texts: of the tokens that SPECIAL names.

    stops: ids that end an answer. sampling: fields of a generation_config.json.
    """

    tokenizer_json: bytes = field(repr=False)
    chat_template: str | None = field(repr=False)
    special_texts: Mapping[str, str]
    stops: tuple[int, ...]
    sampling: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write the files that ssmd reads of a source's folder."""
        (folder / "tokenizer.json").write_bytes(self.tokenizer_json)
        generation = {"eos_token_id": list(self.stops), **self.sampling}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n", newline="\n")


def vocabulary_of(read: GGUF) -> Vocabulary:
    """Return the vocabulary of a file. Raises SourceError if it is of an unsupported kind, or damaged."""
    fields = read.fields
    model, name = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2":
        kind = "SentencePiece's" if model == "llama" else f"of the kind {shown(str(model))}"
        raise SourceError(f"{read.file}: its tokenizer is {kind}; from GGUF ssmd reads byte-level BPE (gpt2) only")
    if not isinstance(name, str) or name not in PRE:
        raise SourceError(
            f"{read.file}: tokenizer.ggml.pre is {'missing' if name is None else shown(str(name))}, so its text would "
            f"be cut into other tokens than it was trained with; ssmd knows {', '.join(PRE)}"
        )
    tokens = _texts(read, "tokenizer.ggml.tokens")
    kinds = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise SourceError(f"{read.file}: tokenizer.ggml.token_type does not have one number for each token")
    odd = next((k for k in kinds if k not in (NORMAL, CONTROL, USER_DEFINED, UNUSED)), None)
    if odd is not None:
        raise SourceError(
            f"{read.file}: a token is of type {str(odd)[:20]}, which a byte-level vocabulary does not have"
        )
    padding = {i for i, k in enumerate(kinds) if k == UNUSED and tokens[i] == f"[PAD{i}]"}  # by the converter
    ids = {token: i for i, token in enumerate(tokens) if i not in padding}
    if len(ids) + len(padding) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if i not in padding and ids[t] != i)
        raise SourceError(f"{read.file}: the token {shown(twice)} stands twice in its vocabulary")
    special = _special(read, len(tokens))
    pre = PRE[name]
    bos = fields.get("tokenizer.ggml.add_bos_token", pre.bos)
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], k == CONTROL) for i, k in enumerate(kinds) if k in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": pre.steps[0] if len(pre.steps) == 1 else {"type": "Sequence", "pretokenizers": pre.steps},
        "post_processor": _begins(tokens, special["bos"]) if bos is True and "bos" in special else None,
        "decoder": _byte_level(splits=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole,
            "vocab": ids,
            "merges": _merges(read, ids),
        },
    }
    template = fields.get("tokenizer.chat_template")
    if not (template is None or isinstance(template, str)):
        raise SourceError(f"{read.file}: tokenizer.chat_template is not a text")
    ends = {i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k == CONTROL and t in ENDS}
    ends |= {i for kind in ("eos", "eot", "eom") if (i := _token(read, kind, len(tokens))) is not None}
    given = {ours: fields.get(f"general.sampling.{theirs}") for theirs, ours in SAMPLING.items()}
    return Vocabulary(
        tokenizer_json=json.dumps(whole, ensure_ascii=False).encode(),
        chat_template=template,
        special_texts={kind: tokens[i] for kind, i in special.items()},
        stops=tuple(sorted(ends)),
        sampling={name: value for name, value in given.items() if isinstance(value, int | float)},
    )


def _texts(read: GGUF, name: str) -> list[str]:
    value = read.fields.get(name)
    if not isinstance(value, list) or not all(isinstance(t, str) for t in value):
        raise SourceError(f"{read.file}: {name} is {'missing' if value is None else 'not a list of texts'}")
    return value


def _token(read: GGUF, kind: str, count: int) -> int | None:
    """Return the id of a special token; None if the file names none. Raises SourceError if it is no token's."""
    value = read.fields.get(f"tokenizer.ggml.{kind}_token_id")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < count:
        raise SourceError(f"{read.file}: tokenizer.ggml.{kind}_token_id is {str(value)[:20]}, of {count} tokens")
    return value


def _special(read: GGUF, count: int) -> dict[str, int]:
    found = {kind: _token(read, KEYS[kind], count) for kind in SPECIAL}
    return {kind: token for kind, token in found.items() if token is not None}


def _merges(read: GGUF, ids: Mapping[str, int]) -> list[list[str]]:
    """Return the merges as pairs. Raises SourceError if one is not of tokens."""
    made = []
    for text in _texts(read, "tokenizer.ggml.merges"):
        pair = text.split(" ")
        if len(pair) != 2 or not (pair[0] in ids and pair[1] in ids and "".join(pair) in ids):
            raise SourceError(f"{read.file}: the merge {shown(text)} is not of two tokens to a third")
        made.append(pair)
    return made


def _added(token: int, text: str, control: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": control}
    return {"id": token, "content": text, **flags}


def _begins(tokens: list[str], bos: int) -> dict[str, Any]:
    """Return the post-processor that puts BOS before a text."""
    text = tokens[bos]
    single = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
    }
