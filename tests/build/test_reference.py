"""The reference of an artifact: the logits of a text, and the distance of another's logits from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from conftest import TinyArtifacts
from tokenizers import Tokenizer as Library

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.build.quality import QualityError, compared, measure
from ssmd.build.reference import Reference, ReferenceFailed, golden
from ssmd.families import weights
from ssmd.families.registry import family_of
from ssmd.families.rotation import rotated
from ssmd.model.artifact import Artifact
from ssmd.model.random_source import SeededSource
from ssmd.model.source import Source
from ssmd.text.tokenizer import Tokenizer
from ssmd_litert.runtime import LiteRTRuntime


@pytest.mark.parametrize("variant", ["granite", "mamba"])
def test_rows_are_those_of_single_steps(variant: str, tmp_path: Path) -> None:
    source = Source.open(tiny.write_source(tmp_path / variant, variant))
    family = family_of(source.config)
    config = family.parse(source.config)
    module = author(family, config, {n: b(source) for n, b in family.bindings(config).items()}, 128)
    tokens = np.random.default_rng(3).integers(0, config.vocabulary, 75).tolist()
    rows = Host(module, 80).rows(tokens, 64)
    assert rows.shape == (75, config.vocabulary)
    host = Host(module)
    single = np.stack([host.feed([token], 1) for token in tokens])
    assert np.abs(rows - single).max() <= 2e-5 * np.abs(single).max()
    tokenizer = Tokenizer.open(source.path / "tokenizer.json")
    reference = Reference.of(module, tokenizer)
    ids = Library.from_str(source.tokenizer_json.decode()).encode("The harbour had been").ids
    assert reference.text[: len(ids)] == ids
    assert reference.text_logits.shape == (min(128, len(reference.text)), config.vocabulary)
    reference.check(module)
    next(p for n, p in module.named_parameters() if n.endswith("_out")).data.mul_(1.05)
    with pytest.raises(ReferenceFailed, match="other logits"):
        reference.check(module)
    module.embedding.data[:] = torch.nan
    with pytest.raises(ReferenceFailed, match="not finite"):
        Reference.of(module, tokenizer)


@pytest.mark.parametrize("variant", ["granite", "llama-untied", "mamba", "falcon-h1"])
def test_values_made_by_layer_give_the_same_bits(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotated form too: its small matrices belong to no layer."""
    name, fields = tiny.VARIANTS[variant]
    source = SeededSource({"model_type": name, "vocab_size": 300, **fields}, 1)
    family = family_of(source.config)
    config = family.parse(source.config)
    tokens = np.random.default_rng(3).integers(0, config.vocabulary, 70).tolist()
    bindings = family.bindings(config)
    for form in (bindings, rotated(bindings)):
        whole = author(family, config, {n: b(source) for n, b in form.items()}, 128)
        monkeypatch.setattr(weights, "LATE_BYTES", 2048)
        parameters = weights.Parameters(form, source)
        assert {"embedding", "layer0_out", "layer0_o"} & parameters.late.keys()
        module = author(family, config, parameters, 128)
        assert np.array_equal(golden(module, tokens), golden(whole, tokens))
        assert np.array_equal(Host(module, 80).rows(tokens, 64), Host(whole, 80).rows(tokens, 64))
        assert all(not getattr(module, n).flatten()[4:].any() for n in parameters.late), "its memory is given back"


@pytest.mark.parametrize("count", [2, 30, 64, 65, 150])
def test_perplexity_and_divergence(count: int) -> None:
    """Against PyTorch's own."""
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((count, 50), np.float32) * 3
    found = reference + rng.standard_normal((count, 50), np.float32) * 0.3
    tokens = rng.integers(0, 50, count).tolist()
    told = compared(found, reference, tokens)
    own, true = torch.from_numpy(found), torch.from_numpy(reference)
    after = torch.tensor(tokens[1:])
    cross_entropy = torch.nn.functional.cross_entropy
    assert told["perplexity"] == pytest.approx(float(cross_entropy(own[:-1], after).exp()), rel=1e-3)
    assert told["perplexity_f32"] == pytest.approx(float(cross_entropy(true[:-1], after).exp()), rel=1e-3)
    divergence = torch.nn.functional.kl_div(own.log_softmax(-1), true.log_softmax(-1), log_target=True, reduction="sum")
    assert told["kl"] == pytest.approx(float(divergence) / count, rel=1e-3)
    assert told["same"] == pytest.approx(float((own.argmax(-1) == true.argmax(-1)).double().mean()), rel=1e-3)
    assert compared(reference, reference, tokens)["kl"] == 0
    told = compared(reference * 1e4, reference, tokens)
    assert np.isfinite(list(told.values())).all()
    assert told["perplexity"] > 1e300


def test_an_artifact_that_computes_no_numbers(artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = Artifact.open(artifacts["llama-int8"])
    program = LiteRTRuntime().load(artifact)
    decode = program.decode
    monkeypatch.setattr(program, "decode", lambda handles, tokens: decode(handles, tokens) * np.nan)
    with pytest.raises(QualityError, match="quantized to int8 its logits are not finite"):
        measure(artifact, program, [1, 2, 3], np.zeros((3, artifact.manifest.vocabulary), np.float32))
    program.close()
