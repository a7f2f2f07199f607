"""Everything that a config.json can say: the re-authored module computes what transformers does, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
import transformers
from numpy.typing import NDArray

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.families.registry import family_of
from ssmd.model.source import Source
from ssmd.refit.install import config_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers' own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

RELATIVE = 1e-5  # of the largest logit, as in test_authoring.py
SEEN = 50 * RELATIVE  # another config is off by more
TOKENS = 150
PARTS = ((64, 64), (16, 13), (1, 1), (128, 72))  # (bucket, tokens of it)


def tokens(vocabulary: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(1).integers(0, vocabulary, TOKENS)]


def theirs(model: Any, position: int = -1) -> NDArray[np.float32]:
    """Logits (V,) of transformers in one call."""
    rows, _ = oracle.continued(model, tokens(model.config.vocab_size))
    row: NDArray[np.float32] = rows[position]
    return row


def ours(folder: Path, said: list[str] | None = None) -> NDArray[np.float32]:
    """Logits (V,) after the same tokens, fed in parts; `said` gets what a build says. Raises FamilyError where the
    config is refused."""
    said = [] if said is None else said
    source = Source.open(folder)
    family = family_of(source.config)
    config = config_of(family, source, said.append)
    bound = {name: binding(source) for name, binding in family.bindings(config).items()}
    host = Host(author(family, config, bound, 256))
    ids = tokens(config.vocabulary)
    for bucket, count in PARTS:
        row = host.feed(ids[host.position : host.position + count], bucket)
    assert host.position == TOKENS
    return row


def relative(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


TABLE: dict[str, Any] = {"rope_theta": 10_000.0, "original_max_position_embeddings": 24}
ROPES: dict[str, dict[str, Any]] = {  # of 24 positions, where 150 are used
    "linear": {"rope_type": "linear", "factor": 3.7},
    "llama3": {**TABLE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {**TABLE, "rope_type": "yarn", "factor": 8.0},
    "yarn, all said": {**TABLE, "type": "yarn", "factor": 8, "attention_factor": 1.4, "beta_fast": 4, "beta_slow": 0.7}
    | {"truncate": False},
    "yarn, mscale": {
        **TABLE,
        "rope_type": "yarn",
        "factor": None,
        "mscale": 0.9,
        "mscale_all_dim": 0.3,
        "truncate": None,
    },
}
USUAL = ("linear", "yarn")  # not only in full, of every family
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny.LLAMA,
    "qwen3": tiny.QWEN3,
    "granitemoehybrid": tiny.GRANITE | tiny.ROPE,
    "falcon_h1": tiny.FALCON_H1,
    "bamba": tiny.BAMBA,
    "lfm2": tiny.LFM2,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "rope",
    [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.full]) for name in ROPES],
)
def test_ropes_that_stretch(tmp_path: Path, family: str, rope: str) -> None:
    """As a model card says it: `rope_scaling` is put beside the `rope_parameters` that are there."""
    fields = {"model_type": family, **FAMILIES[family], "rope_theta": 10_000.0}
    fields["max_position_embeddings"] = 192
    plain, other = ({**fields, "rope_scaling": value} for value in (None, ROPES[rope]))
    expected = theirs(tiny.write_odd(tmp_path / "scaled", other))
    assert relative(theirs(tiny.write_odd(tmp_path / "plain", plain)), expected) > SEEN
    assert relative(ours(tmp_path / "scaled"), expected) < RELATIVE


TIED: dict[str, dict[str, Any]] = {  # of each way in which a family's other weights know of it
    "llama": tiny.LLAMA,
    "falcon_h1": tiny.FALCON_H1,
    "mamba": tiny.MAMBA,
    "lfm2": tiny.LFM2 | {"tie_embedding": True, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("family", TIED)
def test_tied_embeddings_beside_a_head(tmp_path: Path, family: str) -> None:
    """Another head is used, and that is said; one that is the embedding, in another dtype too, is none."""
    from safetensors.torch import load_file, save_file

    tiny.write_odd(tmp_path, {"model_type": family, "tie_word_embeddings": True, **TIED[family]})
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    [embedding] = [name for name in tensors if "embed" in name and "norm" not in name]
    logits = []
    for head in (None, tensors[embedding].float(), tensors[embedding].flip(0)):
        heads = {} if head is None else {"lm_head.weight": head.contiguous()}
        save_file({**tensors, **heads}, file, {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager", dtype=torch.float32
        ).eval()
        said: list[str] = []
        logits.append(ours(tmp_path, said))
        assert relative(logits[-1], theirs(model)) < RELATIVE
        assert len(said) == (len(logits) == 3)
    np.testing.assert_array_equal(logits[0], logits[1])
    assert relative(logits[2], logits[0]) > SEEN
