"""Everything that a config.json can say: the re-authored module computes what transformers does, or it is refused.

The fields are walked: those of transformers' config classes, and what its code asks a config for while a model is made
and computes. One that a new transformers adds fails here, until it is read, refused, or found to make no difference.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
import transformers
from fields import BASE, OTHERWISE, REFUSED, REFUSED_EVERYWHERE, SAME, USED, Change
from numpy.typing import NDArray

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.families.fields import FamilyError, Recorded
from ssmd.families.neutral import NEUTRAL, ONLY
from ssmd.families.registry import FAMILIES, family_of
from ssmd.model.formats import QUANTIZED
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
WITH_ROPE = ("llama", "qwen3", "granitemoehybrid", "falcon_h1", "bamba", "lfm2", "lfm2_moe")


@pytest.mark.parametrize("family", WITH_ROPE)
@pytest.mark.parametrize(
    "rope",
    [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.full]) for name in ROPES],
)
def test_ropes_that_stretch(tmp_path: Path, family: str, rope: str) -> None:
    """As a model card says it: `rope_scaling` is put beside the `rope_parameters` that are there."""
    fields = {"model_type": family, **BASE[family], "rope_theta": 10_000.0}
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


def changes(table: Mapping[str, list[Change]]) -> list[Any]:
    """(family, change) as pytest's parameters, by family and field."""
    return [
        pytest.param(family, change, id=f"{family}-{next(iter(change))}-{number}")
        for family, all_of_it in table.items()
        for number, change in enumerate(all_of_it)
    ]


def config_with(family: str, change: Change) -> dict[str, Any]:
    return {"model_type": family, "vocab_size": 384, **BASE[family], **change}


def parsed(config: Mapping[str, Any]) -> Any:
    """Parse the model's config, without the number of tokens it was trained for."""
    return dataclasses.replace(family_of(config).parse(config), max_position=1)


@cache
def plainly(family: str) -> Any:
    """transformers' model of the family's base."""
    with tempfile.TemporaryDirectory() as folder:
        return tiny.write_odd(Path(folder), config_with(family, {}))


@cache
def said_plainly(family: str) -> NDArray[np.float32]:
    """Logits (V,) of the family's base."""
    return theirs(plainly(family))


@pytest.mark.parametrize(("family", "change"), changes(USED))
def test_a_field_that_is_read(tmp_path: Path, family: str, change: Change) -> None:
    model = tiny.write_odd(tmp_path, config_with(family, change))
    expected, before = theirs(model), said_plainly(family)
    assert expected.shape != before.shape or relative(before, expected) > SEEN, "it makes no difference in transformers"
    assert relative(ours(tmp_path), expected) < RELATIVE


def in_transformers(family: str, change: Change, folder: Path) -> NDArray[np.float32]:
    """Logits (V,) of the base's weights in the model that transformers makes of the changed config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_with(family, change)))
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(plainly(family).state_dict())
    return theirs(model)


@pytest.mark.parametrize("family", BASE)
def test_fields_that_make_no_difference(tmp_path: Path, family: str) -> None:
    """All at once; and those that say, with these values, what is said without."""
    otherwise = {name: OTHERWISE[name] for name in NEUTRAL[family] - {"model_type"}}
    expected, base = said_plainly(family), dict(BASE[family])
    if family == "granitemoehybrid":
        base["position_embedding_type"] = None
        expected = in_transformers(family, base, tmp_path / "plain")
    for number, change in enumerate((otherwise, *SAME[family])):
        assert parsed(config_with(family, base | change)) == parsed(config_with(family, base)), change
        if number == 0 or next(iter(change)) not in BASE[family]:
            found = in_transformers(family, base | change, tmp_path / str(number))
            assert relative(found, expected) < RELATIVE, change


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "change"),
    changes(
        {family: [{name: OTHERWISE[name]} for name in sorted(NEUTRAL[family] - {"model_type"})] for family in BASE}
    ),
)
def test_a_field_that_makes_no_difference(tmp_path: Path, family: str, change: Change) -> None:
    base = dict(BASE[family]) | ({"position_embedding_type": None} if family == "granitemoehybrid" else {})
    expected = in_transformers(family, base, tmp_path / "plain")
    assert relative(in_transformers(family, base | change, tmp_path / "changed"), expected) < RELATIVE


@pytest.mark.parametrize(("family", "change"), changes({f: [*REFUSED[f], *REFUSED_EVERYWHERE] for f in BASE}))
def test_a_field_that_is_refused(family: str, change: Change) -> None:
    parsed(config_with(family, {}))
    with pytest.raises(FamilyError, match=rf"config\.json: .*({'|'.join(change)})"):
        parsed(config_with(family, change))


# What a config has that no config.json says: properties, and where parts of a model may run.
OWN = {"is_heterogeneous", "sub_configs", *(f"base_model_{kind}_plan" for kind in ("ep", "fsdp", "pp", "tp"))}
VISION = {"vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"}  # of pictures


def asked_of(config: Any) -> set[str]:
    """Return the config fields that transformers reads to make a model, prefill and decode."""
    kind: Any = type(config)
    plain, asked = kind.__getattribute__, set()

    def noted(self: Any, name: str) -> Any:
        asked.add(name)
        return plain(self, name)

    kind.__getattribute__ = noted
    try:
        model = tiny.randomized(config)
        _, cache = oracle.continued(model, [1, 2, 3])
        oracle.continued(model, [4], cache, 3)
    finally:
        del kind.__getattribute__
    said = {name for name in asked if not name.startswith("_")}
    return {name for name in said if not callable(getattr(kind, name, None)) and not _is_property(kind, name)}


def _is_property(kind: Any, name: str) -> bool:
    """Report if transformers derives a field from others; a config.json that has it cannot be loaded."""
    return isinstance(getattr(kind, kind.attribute_map.get(name, name), None), property)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_known(family: str) -> None:
    """Each field that is read has a change here that makes a difference; each refused field has one that is refused."""
    read: set[str] = set()
    for change in ({}, *USED[family], *SAME[family], *REFUSED[family]):
        recorded = Recorded(config_with(family, change))
        with suppress(FamilyError):
            FAMILIES[family].parse(recorded)
        read |= recorded.asked
    said = json.loads(json.dumps(config_with(family, {})))  # transformers writes into the objects in it
    config = transformers.AutoConfig.for_model(said.pop("model_type"), **said)
    asked = {f.name for f in dataclasses.fields(config)} | (asked_of(config) - OWN - VISION) - set(QUANTIZED)
    known = read | NEUTRAL[family] | set(ONLY)
    assert asked - known == set()
    tried = {next(iter(change)) for table in (USED, SAME, REFUSED) for change in table[family]}
    left = read - tried - set(ONLY) - NEUTRAL[family]
    assert {name for name in left if not _is_property(type(config), name)} == set()
    assert set(ONLY) <= {next(iter(change)) for change in REFUSED_EVERYWHERE}
    assert FAMILIES[family].unread(config_with(family, {"new": 1, "none": None})) == ("new",)
