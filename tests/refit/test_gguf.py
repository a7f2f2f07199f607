"""GGUF files as sources: every family's weights, tokenizer and config as transformers has them, and files that lie."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import vocabularies
from conftest import TinyArtifacts
from forked import DaemonProcess
from gguffiles import rounded, write_gguf
from refitting import stripped
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from ssmd.cli import app, making
from ssmd.families.fields import FamilyError
from ssmd.families.registry import family_of
from ssmd.families.weights import BLOCK_ELEMENTS
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source, SourceError
from ssmd.refit import catalog
from ssmd.refit.gguf import loss
from ssmd.refit.gguf.source import GGUFSource
from ssmd.refit.gguf.tokenizer import PRE
from ssmd.refit.refit import differences, stable
from ssmd.runtime.protocol import get_runtime
from ssmd.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


def varied(source: Path, folder: Path, config: Mapping[str, Any], **tensors: Any) -> Path:
    """Copy a source with other fields and further tensors, whose shapes are given."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    said = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    rng = np.random.default_rng(0)
    made = load_file(source / "model.safetensors")
    made |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def untied(source: Path, folder: Path) -> Path:
    """Llama with a head and biases of its own."""
    more: dict[str, Any] = {"lm_head.weight": (384, 96)}
    for i in range(3):
        heads = (("q", 96), ("k", 32), ("v", 32), ("o", 96))
        more |= {f"model.layers.{i}.self_attn.{n}_proj.bias": (rows,) for n, rows in heads}
        more |= {f"model.layers.{i}.mlp.{n}_proj.bias": (r,) for n, r in (("gate", 192), ("up", 192), ("down", 96))}
    return varied(source, folder, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}, **more)


def scaled(source: Path, folder: Path, rope: Mapping[str, Any]) -> Path:
    return varied(source, folder, {"rope_parameters": dict(rope)})


def with_head(source: Path, folder: Path) -> Path:
    """Falcon-H1 as llama.cpp computes it: with a head, and the norm after the gate."""
    said = {"tie_word_embeddings": False, "mamba_norm_before_gate": False}
    return varied(source, folder, said, **{"lm_head.weight": (397, 96)})


def itself(source: Path, folder: Path) -> Path:
    return source


VARIED: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "llama-untied": ("llama", untied),
    "llama-rope3": ("llama", lambda source, folder: scaled(source, folder, tiny.LLAMA3_ROPE)),
    "falcon-h1": ("falcon-h1-norm", with_head),
}
SOURCES = (
    *("llama", "granite", "granite-groups", "qwen3", "mamba", "falcon-mamba", "lfm2", "mamba2-groups"),
    *("nemotron-h-biases", *VARIED),
)


def source_named(artifacts: TinyArtifacts, name: str, folder: Path) -> Path:
    variant, make = VARIED.get(name, (name, itself))
    return make(artifacts.source(f"{variant}-f32"), folder / f"source-{name}")


def opened(file: Path) -> GGUFSource:
    return GGUFSource.make(file, Path(tempfile.mkdtemp(dir=file.parent)))


@pytest.fixture(scope="module")
def llama(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(artifacts.source("llama-f32"), tmp_path_factory.mktemp("llama") / "tiny.gguf")


# Weights, config, tokens


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", SOURCES)
def test_weights_and_config_are_the_sources(artifacts: TinyArtifacts, name: str, kind: str, tmp_path: Path) -> None:
    """All parameters, from what the file holds, whole and in blocks; A goes through exp and log."""
    folder = source_named(artifacts, name, tmp_path)
    read = opened(write_gguf(folder, tmp_path / "a.gguf", kind))
    original = Source.open(rounded(folder, tmp_path / "rounded", kind))
    family = family_of(original.config)
    assert family_of(read.config) is family
    assert family.unread(read.config) == ()
    ours, theirs = (family.bindings(family.parse(s.config)) for s in (read, original))
    assert ours.keys() == theirs.keys()
    multiplied = name == "falcon-h1"  # rounded by the converter after the multiplier, so only nearly alike in Q8_0
    for parameter, binding in ours.items():
        if multiplied and parameter in ("norm", "head"):  # one multiplier is in the other
            continue
        found, expected = binding(read), theirs[parameter](original)
        assert found.shape == expected.shape
        if multiplied or parameter.endswith("_A"):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=(0.02 if kind == "Q8_0" else 1e-6))
        else:
            assert np.array_equal(found, expected), parameter
        assert np.array_equal(np.concatenate(list(binding.blocks(read))), found)
    plans = [family.plan(family.parse(s.config)).model_dump() for s in (read, original)]
    assert json.loads(json.dumps(plans[0]), parse_float=close) == json.loads(json.dumps(plans[1]), parse_float=close)
    text = (ROOT / "README.md").read_text("utf-8")
    tokens = [list(Tokenizer.open(s.path / "tokenizer.json").encode(text)) for s in (read, original)]
    assert tokens[0] == tokens[1]
    assert read.special_tokens == original.special_tokens
    assert (read.stop_tokens, read.chat_template) == (original.stop_tokens, original.chat_template)


def close(text: str) -> float:
    """A number of JSON as float32: GGUF's fields are no more."""
    return float(np.float32(text))


def test_rows_of_any_range_are_those_of_the_whole(llama: Path, artifacts: TinyArtifacts) -> None:
    read, original = opened(llama), Source.open(artifacts.source("llama-f32"))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        shape = original.tensors[name].shape
        whole = original.tensor(name, shape)
        for first in range(0, shape[0], 5):
            for last in (first, first + 1, first + 17, shape[0] + 9):
                assert np.array_equal(read.tensor(name, shape, first, last), whole[first:last])


def test_logits_are_transformers_of_the_same_values(artifacts: TinyArtifacts, shelf: Path, tmp_path: Path) -> None:
    """A pulled file, in float32, against transformers with the values that Q8_0 holds."""
    import torch
    import transformers

    folder = artifacts.source("granite-f32")
    file = write_gguf(folder, tmp_path / "tiny.gguf", "Q8_0")
    done = pull(tmp_path, "mine", "--from", str(file))
    assert done.exit_code == 0, done.output
    made = Artifact.open(tmp_path / "models" / "mine" / "litert-cpu-f32")
    program = get_runtime("litert").load(made, device="cpu")
    ids = [(7 * i * i + 3) % 380 for i in range(40)]
    try:
        handle = program.new_state()
        program.prefill(handle, ids[:33])
        state = program.save(handle)
        found = [program.decode([handle], [token])[0] for token in ids[33:]]
        again = program.restore(state)
        assert all(np.array_equal(program.decode([again], [t])[0], row) for t, row in zip(ids[33:], found, strict=True))
    finally:
        program.close()
    rounded(folder, tmp_path / "rounded", "Q8_0")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, 33:].numpy()
    np.testing.assert_allclose(np.stack(found), expected, atol=2e-5 * np.abs(expected).max())
    exact = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert not np.array_equal(exact, load_file(tmp_path / "rounded" / "model.safetensors")["model.embed_tokens.weight"])


def test_a_killed_daemon_goes_on_with_a_pulled_file(artifacts: TinyArtifacts, shelf: Path, tmp_path: Path) -> None:
    file = write_gguf(artifacts.source("granite-f32"), tmp_path / "tiny.gguf", "Q4_1")
    assert pull(tmp_path, "mine", "--from", str(file)).exit_code == 0
    first = [{"role": "user", "content": "Tell me a story about a river and a bridge."}]
    with DaemonProcess(tmp_path / "models" / "mine" / "litert-cpu-f32", tmp_path / "daemon") as daemon:
        reply = daemon.chat(first, max_tokens=16)
        daemon.kill()
        daemon.start()
        said = [*first, {"role": "assistant", "content": reply.text}, {"role": "user", "content": "And then?"}]
        again = daemon.chat(said, max_tokens=4)
    assert (again.session, again.usage["ssmd"]["resume"]) == (reply.session, "exact")
    assert again.usage["prompt_tokens_details"]["cached_tokens"] >= reply.usage["prompt_tokens"]


def test_a_hybrid_without_mamba_layers_is_granite(tmp_path: Path) -> None:
    """As Granite 4 without Mamba layers is written, and Granite 3, whose layers rotate."""
    fields = {"model_type": "granitemoehybrid", **tiny.GRANITE, **tiny.ROPE, "layer_types": ["attention"] * 4}
    tiny.write_odd(tmp_path / "source", fields)
    read = opened(write_gguf(tmp_path / "source", tmp_path / "a.gguf"))
    original = Source.open(tmp_path / "source")
    family = family_of(original.config)
    assert read.read.fields["general.architecture"] == "granite"
    assert family.plan(family.parse(read.config)) == family.plan(family.parse(original.config))
    for parameter, binding in family.bindings(family.parse(read.config)).items():
        assert np.allclose(binding(read), family.bindings(family.parse(original.config))[parameter](original)), (
            parameter
        )


ORIGINALS: dict[str, Callable[[], Any]] = {
    "smollm": vocabularies.byte_level,
    "refact": vocabularies.byte_level,
    "qwen2": lambda: vocabularies.split_by(vocabularies.QWEN, vocabularies.with_added),
    "dbrx": lambda: without_nfc(vocabularies.split_by(vocabularies.LLAMA, vocabularies.with_added)),
    "llama-bpe": lambda: without_nfc(vocabularies.split_by(vocabularies.LLAMA, vocabularies.with_added)),
    "lfm2": lambda: without_nfc(vocabularies.split_by(vocabularies.LLAMA, vocabularies.with_added)),
}


def without_nfc(tokenizer: Any) -> Any:
    whole = json.loads(tokenizer.to_str())
    return type(tokenizer).from_str(json.dumps(whole | {"normalizer": None}))


@pytest.mark.parametrize("pre", ORIGINALS)
def test_token_ids_are_the_original_tokenizers(artifacts: TinyArtifacts, pre: str, tmp_path: Path) -> None:
    """Over texts of the repository in several scripts, with control tokens as text."""
    made = ORIGINALS[pre]()
    count = made.get_vocab_size()
    source = varied(
        artifacts.source("llama-f32"),
        tmp_path / "source",
        {"vocab_size": count},
        **{"model.embed_tokens.weight": (count, 96)},
    )
    made.save(str(source / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    read = opened(write_gguf(source, tmp_path / "a.gguf", pre=pre))
    ours, theirs = (Tokenizer.open(folder / "tokenizer.json") for folder in (read.path, source))
    names = ("docs/models.md", "tests/data/template-features.txt", "tests/data/templates/qwen3.jinja", "tests/tiny.py")
    odd = "\r\n 12345 1,000 a1b²½ it's IT'S e\u0301 日本語\u00a0x  \n\n<|im_end|><tool>!!"
    for text in (*((ROOT / name).read_text("utf-8") for name in names), *vocabularies.CORPUS[:3], odd):
        assert list(ours.encode(text)) == list(theirs.encode(text))
    bos = PRE[pre].bos
    assert ours.beginning == ((made.token_to_id("<s>"),) if bos else ())


def test_the_file_says_whether_bos_begins(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    source = artifacts.source("llama-f32")
    for said, expected in ((True, (1,)), (False, ())):
        change = field("tokenizer.ggml.add_bos_token", said)
        file = write_gguf(source, tmp_path / f"{said}.gguf", pre="llama-bpe", change=change)
        assert Tokenizer.open(opened(file).path / "tokenizer.json").beginning == expected


def test_ends_of_turns_and_sampling_come_along(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    read = opened(write_gguf(artifacts.source("llama-f32"), tmp_path / "a.gguf", change=change))
    assert read.stop_tokens == (0, 2, 7)  # <|endoftext|>, <|im_end|>, and what the file names
    said = json.loads((read.path / "generation_config.json").read_text())
    assert said == {"eos_token_id": [0, 2, 7], "temperature": 0.5, "top_k": 20}


# Identity, and what is lost


def test_lineage_is_the_files_own(artifacts: TinyArtifacts, llama: Path, tmp_path: Path) -> None:
    """Not that of its safetensors source, though the values are the same; the texts do not count, each byte does."""
    source = artifacts.source("llama-f32")
    first = opened(llama).lineage
    assert first != Source.open(source).lineage
    named = write_gguf(source, tmp_path / "b.gguf", change=lambda w: w.add_name("another"))
    assert opened(named).lineage == first
    assert opened(write_gguf(source, tmp_path / "c.gguf", "F16")).lineage != first
    turned = scaled(source, tmp_path / "turned", tiny.LLAMA["rope_parameters"] | {"rope_theta": 5e5})
    assert opened(write_gguf(turned, tmp_path / "e.gguf")).lineage != first
    data = bytearray(llama.read_bytes())
    data[-40] ^= 1
    (tmp_path / "d.gguf").write_bytes(data)
    assert opened(tmp_path / "d.gguf").lineage != first


def test_the_added_error_is_measured(artifacts: TinyArtifacts, shelf: Path, tmp_path: Path) -> None:
    [graph] = [g for g in catalog.shipped() if g.header.quantization == "int8"]
    read = opened(write_gguf(artifacts.source("granite-f32"), tmp_path / "a.gguf", "Q4_0"))
    said = loss.sentence(read, graph.header, "int8")
    found = re.fullmatch(
        r"the weights are Q4_0, F32 in the file and int8 here: this adds an error of ([\d.]+)% \(RMS, relative to the "
        r"weights\), measured on ([\d,]+) of them",
        said,
    )
    assert found is not None, said
    assert 0.2 < float(found[1]) < 1.5  # int8's steps are 1/127 of a row's largest value
    assert loss.sentence(read, None, "f32") == "the weights are Q4_0, F32 in the file and f32 here"


def test_a_plan_decides_whether_a_graph_fits(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Falcon-H1's multipliers are in the weights of a graph, and in those of a GGUF file; its sizes are the plan's."""
    folder = source_named(artifacts, "falcon-h1", tmp_path)
    read, original = opened(write_gguf(folder, tmp_path / "a.gguf")), Source.open(folder)

    class Header:
        family, name, runtime, device_class = "falcon_h1", "a", "litert", "cpu"
        buckets, tiers = (16, 64), (128, 256)
        files: tuple[Any, ...] = ()
        config = stable(original.config)

    header: Any = Header()
    assert read.config.get("key_multiplier", 1.0) != original.config["key_multiplier"]
    assert differences(header, read.config) == {}
    assert differences(header, {**original.config, "rms_norm_eps": 0.5}).keys() == {"rms_norm_eps"}


# The commands


@pytest.fixture(scope="module")
def stripped_ones(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    for name in ("granite-f32", "openvino-granite-int8"):
        graph = stripped(Artifact.open(artifacts[name]), Source.open(artifacts.source(name)), "tiny-granite")
        h = graph.header
        graph.save(folder / catalog.file_name(h.name, h.runtime, h.device_class, h.quantization))
    return folder


@pytest.fixture
def shelf(stripped_ones: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(catalog, "SHIPPED", stripped_ones)
    return stripped_ones


def pull(tmp_path: Path, *arguments: str) -> Any:
    places = ["--data-dir", str(tmp_path / "data"), "--models-dir", str(tmp_path / "models")]
    return CliRunner().invoke(app, ["pull", *arguments, *places])


def test_errors_name_the_file_and_leave_nothing(llama: Path, shelf: Path, tmp_path: Path) -> None:
    """Not the temporary folder of its texts, which is gone."""
    before = {p.name for p in Path(tempfile.gettempdir()).glob(f"{making._TEXTS}*")}
    done = pull(tmp_path, "mine", "--from", str(llama))
    assert done.exit_code == 1
    assert f"ssmd build {llama}" in done.output
    data = llama.read_bytes()
    (tmp_path / "nan.gguf").write_bytes(data[:-4] + b"\0\0\xc0\x7f")
    with making.source_of(tmp_path / "nan.gguf") as read:
        assert isinstance(read, GGUFSource)
        name, stored = max(read.stored.items(), key=lambda item: item[1].parts[-1].begin)
        with pytest.raises(SourceError, match=r"nan\.gguf: tensor .* not finite"):
            read.tensor(name, stored.shape)
    with (
        pytest.raises(ValueError, match=re.escape(f"{llama} is wrong")),
        making.source_of(llama) as read,
    ):
        raise ValueError(f"{read.path / 'tokenizer.json'} is wrong")
    assert {p.name for p in Path(tempfile.gettempdir()).glob(f"{making._TEXTS}*")} == before
    assert not (tmp_path / "models" / "mine").exists()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = r"there is no file .*gone\.gguf; one on the hub is named as owner/name:FILE"
    with pytest.raises(making.BuildFailed, match=said), making.source_of(tmp_path / "gone.gguf"):
        pass


def test_a_folder_of_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.Q4_0.gguf", "a.Q8_0.gguf"):
        (tmp_path / name).touch()
    said = r"GGUF files \(a\.Q4_0\.gguf, a\.Q8_0\.gguf\): name the file"
    with pytest.raises(making.BuildFailed, match=said), making.source_of(tmp_path):
        pass


# Refusals


def field(name: str, value: Any) -> Callable[[gguf.GGUFWriter], object]:
    def change(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGUFValueType.get_type(value)
        if kind == gguf.GGUFValueType.FLOAT32 and (abs(value) > 3e38 or abs(value) < 1e-40):
            kind = gguf.GGUFValueType.FLOAT64
        writer.kv_data[0][name] = gguf.GGUFValue(value, kind)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            field("llama.attention.sliding_window", 4096),
            "llama.attention.sliding_window is 4096, which is not supported",
        ),
        (field("llama.expert_count", 8), "has experts (llama.expert_count is 8), which ssmd does not have for llama"),
        (
            field("llama.rope.scaling.type", "longrope"),
            "rope.scaling.type is 'longrope', expected none, linear or yarn",
        ),
        (field("llama.rope.dimension_count", 8), "rope.dimension_count is 8, expected 16, all of a head"),
        (field("llama.attention.causal", False), "attention.causal is False, expected true"),
        (field("llama.rope.freq_base", 1e39), "rope.freq_base is 1e+39, expected a positive number"),
        (field("llama.rope.freq_base", -1.0), "rope.freq_base is -1.0, expected a positive number"),
        (field("llama.rope.freq_base", 1e-60), "rope.freq_base is 1e-60, expected a positive number"),
        (field("tokenizer.ggml.token_type", [0] * 384), "a token is of type 0, which a byte-level vocabulary"),
        (field("split.count", 3), "is one of several parts of a model: join them first"),
        (field("general.type", "mmproj"), "is of the type 'mmproj', not a model"),
        (field("tokenizer.ggml.eot_token_id", 384), "tokenizer.ggml.eot_token_id is 384, of 384 tokens"),
    ],
)
def test_fields_that_are_refused(
    artifacts: TinyArtifacts, change: Callable[[gguf.GGUFWriter], object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=re.escape(said)):
        opened(write_gguf(artifacts.source("llama-f32"), tmp_path / "a.gguf", change=change))


def test_a_table_of_rope_is_compared_within_its_length(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """A head of 2**26 values, which no tensor has, is no reason to compute as many frequencies."""

    def change(writer: gguf.GGUFWriter) -> None:
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            field(f"llama.{name}", 1 << 26)(writer)

    more = {"rope_freqs.weight": np.full(8, 8, np.float32)}
    file = write_gguf(artifacts.source("llama-f32"), tmp_path / "a.gguf", change=change, more=more)
    tracemalloc.start()
    with pytest.raises(SourceError, match=re.escape("is not a table of Llama 3's RoPE")):
        opened(file)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_kinds_of_files_that_are_refused(artifacts: TinyArtifacts, llama: Path, tmp_path: Path) -> None:
    source = artifacts.source("llama-f32")

    def said(file: Path) -> str:
        with pytest.raises(SourceError) as refusal:
            opened(file)
        assert str(refusal.value).startswith(str(file))
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    assert "tokenizer.ggml.pre is 'bloom', so" in said(write_gguf(source, tmp_path / "pre.gguf", pre="bloom"))
    more = {"blk.0.attn_sinks.weight": np.ones(6, np.float32)}
    assert "no tensor 'blk.0.attn_sinks.weight' that" in said(write_gguf(source, tmp_path / "more.gguf", more=more))
    big = write_gguf(source, tmp_path / "big.gguf", endian=gguf.GGUFEndian.BIG)
    assert "it is big-endian" in said(big)
    part = tmp_path / "tiny-00001-of-00003.gguf"
    shutil.copy(llama, part)
    assert "is one of several parts of a model" in said(part)
    data = llama.read_bytes()
    for version, expected in ((1, "GGUF version 1;"), (4, "GGUF version 4;")):
        (tmp_path / "v.gguf").write_bytes(data[:4] + version.to_bytes(4, "little") + data[8:])
        assert expected in said(tmp_path / "v.gguf")
    (tmp_path / "v2.gguf").write_bytes(data[:4] + b"\2\0\0\0" + data[8:])
    assert opened(tmp_path / "v2.gguf").lineage == opened(llama).lineage
    for old, new, expected in (
        (b"gpt2", b"spm1", "its tokenizer is of the kind 'spm1'"),
        (
            b"\5\0\0\0\0\0\0\0llama",
            b"\5\0\0\0\0\0\0\0gemma",
            "its architecture is 'gemma'; from GGUF ssmd reads llama, ",
        ),
    ):
        (tmp_path / "other.gguf").write_bytes(data.replace(old, new, 1))
        assert expected in said(tmp_path / "other.gguf")
    rope = scaled(source, tmp_path / "rope", tiny.LLAMA3_ROPE | {"low_freq_factor": 2.5})
    assert "rope_freqs.weight is not a table of Llama 3's RoPE" in said(write_gguf(rope, tmp_path / "rope.gguf"))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("jamba", "its architecture is 'jamba': it needs Mamba-1 layers whose norms of dt, B and C have weights"),
        ("kimi-linear", "'kimi-linear': it needs Kimi Delta Attention"),
        ("nemotron_h_moe", "Nemotron-3-Nano-30B-A3B takes 30 GB in int8"),
        ("plamo2", "'plamo2': it needs Mamba heads with"),
        ("qwen35moe", "Qwen3.5-35B-A3B takes 35 GB in int8 and 21 GB in int4"),
        ("qwen3next", "'qwen3next': it needs 512 experts"),
        ("rwkv7", "'rwkv7': it needs the time mixing of RWKV-7, which ssmd does not have. Take a model of "),
        ("lfm2moe", "'lfm2moe', a mixture of experts. Experts are read from safetensors only: take a checkpoint"),
    ],
)
def test_an_unbuilt_architecture_is_refused_by_its_need(
    llama: Path, tmp_path: Path, architecture: str, expected: str
) -> None:
    own, other = (struct.pack("<Q", len(name)) + name.encode() for name in ("llama", architecture))
    (tmp_path / "a.gguf").write_bytes(llama.read_bytes().replace(own, other, 1))
    with pytest.raises(SourceError, match=re.escape(expected)) as refusal:
        opened(tmp_path / "a.gguf")
    assert architecture in gguf.MODEL_ARCH_NAMES.values()
    assert "\n" not in str(refusal.value)


def test_experts_of_granite_are_read_from_safetensors(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    change = field("granitehybrid.expert_count", 64)
    with pytest.raises(SourceError, match=r"expert_count is 64\)\. .*granite-4\.0-h-tiny, and ssmd build for runtime"):
        opened(write_gguf(artifacts.source("granite-f32"), tmp_path / "a.gguf", change=change))


def test_a_tensor_of_an_unread_type_is_named(llama: Path, tmp_path: Path) -> None:
    data = bytearray(llama.read_bytes())
    name = b"blk.1.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at : at + 4] == b"\0\0\0\0"
    data[at] = 23
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(SourceError, match=r"tensor 'blk\.1\.attn_q\.weight' is IQ4_XS; ssmd reads F32, F16, Q4_0, "):
        opened(tmp_path / "a.gguf")


def mutations(data: bytes, count: int) -> Iterator[bytes]:
    """Yield copies with damaged bytes, mostly in the header: single ones, whole numbers, cuts, pieces moved."""
    rng = random.Random(1)
    header = data.index(b"blk.2.ffn_up.weight") + 200
    for i in range(count):
        made = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(header if rng.random() < 0.95 else len(made))
            match i % 5:
                case 0:
                    made[at] = rng.randrange(256)
                case 1:
                    made[at : at + 8] = rng.choice((0, 1, 1 << 22, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)).to_bytes(
                        8, "little"
                    )
                case 2:
                    del made[at : at + rng.randrange(1, 64)]
                case 3:
                    made[at:at] = made[at : at + rng.randrange(1, 64)]
                case _:
                    del made[at:]
        yield bytes(made)


def test_damaged_files_are_refused_in_bounded_memory(llama: Path, tmp_path: Path) -> None:
    """300 of them: each is a SourceError or a model of which every row can be read, and takes a few megabytes."""
    data, file = llama.read_bytes(), tmp_path / "a.gguf"
    refused, said = 0, list[str]()
    tracemalloc.start()
    try:
        for damaged in mutations(data, 300):
            file.write_bytes(damaged)
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read = GGUFSource.make(file, folder)
                family = family_of(read.config)
                for binding in family.bindings(family.parse(read.config)).values():
                    for _ in binding.blocks(read):
                        pass
            except (SourceError, FamilyError) as err:
                refused += 1
                said.append(str(err))
            assert tracemalloc.get_traced_memory()[1] - before < 16 << 20
            shutil.rmtree(folder)
    finally:
        tracemalloc.stop()
    assert 150 < refused < 300
    assert all(line.isprintable() for line in said)


def test_a_whole_matrix_is_never_in_float32(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The blocks of a large one take a few blocks' memory."""
    count = 40_000
    source = varied(
        artifacts.source("llama-f32"),
        tmp_path / "source",
        {"vocab_size": count},
        **{"model.embed_tokens.weight": (count, 96)},
    )
    read = opened(write_gguf(source, tmp_path / "a.gguf", "Q8_0"))
    family = family_of(read.config)
    embedding = family.bindings(family.parse(read.config))["embedding"]
    tracemalloc.start()
    try:
        rows = sum(len(block) for block in embedding.blocks(read))
        assert tracemalloc.get_traced_memory()[1] < 24 * BLOCK_ELEMENTS < count * 96 * 4 // 2
    finally:
        tracemalloc.stop()
    assert rows == count
