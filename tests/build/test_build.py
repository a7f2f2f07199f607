"""Artifacts as `ssmd build` makes them: golden values, weights stored once, refusals, nothing left behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from conftest import BUILT, TinyArtifacts, params
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ssmd.build import builder
from ssmd.build.builder import BuildError
from ssmd.cli.build import Quant
from ssmd.cli.build import build as command
from ssmd.cli.making import BuildFailed
from ssmd.families import weights
from ssmd.families.offsets import is_exact
from ssmd.families.registry import family_of
from ssmd.model import smollm2
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source, SourceError
from ssmd.runtime.verify import verify
from ssmd_coreml.build import CONVERTER as COREML
from ssmd_coreml.build import CoreMLConverter
from ssmd_litert.build import CONVERTER, LiteRTConverter
from ssmd_litert.recipe import MIN_WEIGHT_ELEMENTS
from ssmd_litert.runtime import LiteRTRuntime

# float32: XNNPACK's sums in another order than PyTorch's. Others: weights and activations rounded, of random weights.
TOLERANCE = {"f32": 1e-5, "int8": 0.08, "int4": 0.35}


@pytest.fixture(scope="module", params=params(n for n, m in BUILT.items() if m.runtime == "litert"))
def artifact(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Artifact:
    return Artifact.open(artifacts[request.param])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_source(tmp_path_factory.mktemp("source") / "tiny", "llama")


class Oracle:
    """The .tflite in LiteRT's Interpreter, with the host's half in numpy: no code of the runtime."""

    def __init__(self, artifact: Artifact) -> None:
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(str(artifact.file("model.tflite")), num_threads=1)
        self.spec = artifact.manifest.spec
        lengths = {1: "decode", **{b: f"prefill_{b}" for b in artifact.manifest.buckets}}
        self.run = {length: interpreter.get_signature_runner(name) for length, name in lengths.items()}
        shapes = self.run[1].get_input_details()
        self.states = {t.name: np.zeros(shapes[t.name]["shape"], np.float32) for t in self.spec.tensors}
        self.slots = {n: np.full(shapes[n]["shape"], -6e4, np.float32) for n in ("slots",) if n in shapes}
        self.position = 0

    def feed(self, tokens: list[int], bucket: int) -> NDArray[np.float32]:
        n = len(tokens)
        for mask in self.slots.values():
            mask[..., : self.position] = 0
        ids = np.full((1, bucket), 9, np.int32)
        ids[0, :n] = tokens
        at, count = (np.array([v], np.int32) for v in (self.position, n))
        out = self.run[bucket](tokens=ids, pos=at, n_valid=count, **self.states, **self.slots)
        rows = slice(self.position, self.position + n)
        for t in self.spec.tensors:
            if t.recurrent:
                self.states[t.name] = out[t.name].copy()
            elif t.kind == "key":
                self.states[t.name][:, rows] = out[t.name][:, :n].astype(t.numpy_dtype)
            else:
                self.states[t.name][..., rows] = out[t.name][..., :n].astype(t.numpy_dtype)
        self.position += n
        logits: NDArray[np.float32] = out["logits"][0].copy()
        return logits


def test_golden_values_are_those_of_the_graph(artifact: Artifact) -> None:
    golden = load_file(artifact.file("golden.safetensors"))
    tokens, positions = golden["tokens"].tolist(), golden["positions"].tolist()
    assert {golden[name].dtype for name in ("tokens", "positions")} == {np.dtype(np.int32)}
    assert golden["logits"].shape == (len(positions), artifact.manifest.vocabulary)
    assert positions[-1] == len(tokens) - 1
    for bucket in (1, *artifact.manifest.buckets):
        oracle = Oracle(artifact)
        for expected, position in zip(golden["logits"], positions, strict=True):
            while oracle.position <= position:
                logits = oracle.feed(tokens[oracle.position : min(oracle.position + bucket, position + 1)], bucket)
            assert np.abs(logits - expected).max() < TOLERANCE[artifact.manifest.quantization] * np.abs(expected).max()


def test_manifest(artifact: Artifact, artifacts: TinyArtifacts) -> None:
    manifest = artifact.manifest
    source = Source.open(artifacts.source(f"{manifest.name}-f32"))
    family = family_of(source.config)
    assert manifest.family == family.name
    assert manifest.lineage == source.lineage
    assert (manifest.runtime, manifest.device_class) == ("litert", "cpu")
    assert manifest.context == (512 if manifest.spec.rows else None)
    assert manifest.stop_tokens == (0, 2)
    assert manifest.special_tokens.eos == "<|im_end|>"
    kv_dtype = "float32" if manifest.quantization == "f32" else "float16"
    assert manifest.spec == family.plan(family.parse(source.config)).spec(kv_dtype)
    assert set(manifest.files) == {"model.tflite", "tokenizer.json", "chat_template.jinja", "golden.safetensors"}
    assert artifact.file("chat_template.jinja").read_text() == tiny.TEMPLATE
    assert artifact.file("tokenizer.json").read_bytes() == source.tokenizer_json
    assert {f.stat().st_mode & 0o777 for f in artifact.path.iterdir()} == {0o644}


def test_the_manifest_says_what_quantization_costs(artifact: Artifact) -> None:
    quality = artifact.manifest.quality
    text = quality["text"]
    assert 100 < text["tokens"] <= 400
    if artifact.manifest.quantization == "f32":
        assert quality["golden"]["max"] < 1e-4
        assert text["kl"] < 1e-7
        assert artifact.manifest.quantization_recipe == {}
    elif artifact.manifest.quantization == "int8":
        assert 1e-4 < quality["golden"]["rms"] < quality["golden"]["max"] < 0.5
        assert 1e-7 < text["kl"] < 0.01
        assert artifact.manifest.quantization_recipe["rotation"] == 64
    else:
        assert 0.1 < quality["golden"]["rms"] < quality["golden"]["max"] < 1
        assert 0.01 < text["kl"] < 0.02
        assert artifact.manifest.quantization_recipe["offsets"] == 32
    rounded = 0.15 if artifact.manifest.quantization == "int4" else 0.05
    assert text["perplexity"] == pytest.approx(text["perplexity_f32"], rel=rounded)


def test_mamba_1_has_no_long_bucket_unless_asked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SeenError(Exception):
        """Enough was seen."""

    def write(*arguments: Any) -> None:
        plan = arguments[5]
        raise SeenError(plan.buckets, plan.tiers)

    monkeypatch.setattr(builder, "_write", write)
    mamba = Source.open(tiny.write_source(tmp_path / "tiny", "mamba"))
    for one, asked, given in (
        (Source.open(source), None, (16, 64, 256)),
        (mamba, None, (16, 64)),
        (mamba, (16, 256), (16, 256)),
    ):
        with pytest.raises(SeenError) as seen:
            builder.build(CONVERTER, one, tmp_path / "made", name="t", buckets=asked, tiers=(512,))
        assert seen.value.args == (given, (512,))


def test_a_converter_of_whole_weights_reads_each_one_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module with all values gives the golden values too. Large ones could be made late, and are not."""

    class WrittenError(Exception):
        """Enough was seen."""

    def write(*arguments: Any) -> None:
        raise WrittenError

    monkeypatch.setattr(weights, "LATE_BYTES", 2048)
    monkeypatch.setattr(CoreMLConverter, "write", write)
    reads: Counter[str] = Counter()
    tensor = Source.tensor

    def counted(self: Source, name: str, *place: Any) -> NDArray[np.float32]:
        reads[name] += 1
        return tensor(self, name, *place)

    monkeypatch.setattr(Source, "tensor", counted)
    opened = Source.open(source)
    with pytest.raises(WrittenError):
        builder.build(COREML, opened, tmp_path / "made", name="t", quantization="int8", buckets=(16,), tiers=(64,))
    assert reads == dict.fromkeys(opened.tensors, 1)


def test_int4(artifacts: TinyArtifacts) -> None:
    """Rows in blocks of 32 that share a scale and an offset; the embedding, which is the head too, stays int8."""
    made = Artifact.open(artifacts["llama-int4"])
    assert weight_types(made.file("model.tflite")) == {"INT4": 12, "INT8": 1, "FLOAT32": 18}  # k, v, offsets: small
    assert made.manifest.spec.rows[0].dtype == "float16"
    report = verify(made, LiteRTRuntime().load(made))
    assert report.tolerance == 0.5  # 4 bits of random weights; trained ones lose less
    assert report.passed
    assert made.manifest.quality["golden"]["rms"] == pytest.approx(report.worst.rms_relative, rel=1e-3)


def test_int4_of_rows_that_are_no_multiple_of_32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is converted: the converter stays out of this process."""
    monkeypatch.setattr(LiteRTConverter, "prepare", lambda _: None)
    source = Source.open(tiny.write_source(tmp_path / "tiny", "mamba2-odd"))
    with pytest.raises(
        BuildError, match=r"has rows of \d+ values, int4 takes multiples of 32; build with --quant int8"
    ):
        builder.build(CONVERTER, source, tmp_path / "made", name="t", quantization="int4", buckets=(16,), tiers=(64,))
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny"]


def test_artifacts_of_one_source_share_a_lineage_and_a_layout(artifacts: TinyArtifacts) -> None:
    one, other = (Artifact.open(artifacts[f"granite-{q}"]).manifest for q in ("f32", "int8"))
    assert one.lineage == other.lineage
    assert one.spec.digest() == other.spec.digest()
    assert one.build != other.build


def test_weights_are_stored_once(artifact: Artifact, artifacts: TinyArtifacts) -> None:
    """Every large constant of all signatures together is one parameter, in its quantized size."""
    source = Source.open(artifacts.source(f"{artifact.manifest.name}-f32"))
    family = family_of(source.config)
    shapes = {n: bind(source).shape for n, bind in family.bindings(family.parse(source.config)).items()}
    large = {n: int(np.prod(s)) for n, s in shapes.items() if len(s) == 2 and np.prod(s) >= MIN_WEIGHT_ELEMENTS}
    bits = {"f32": 32, "int8": 8, "int4": 4}[artifact.manifest.quantization]
    least = {n: 32 if is_exact(n) else 8 if n == "embedding" else 0 for n in large}
    expected = Counter(size * max(bits, least[n]) // 8 for n, size in large.items())
    if bits == 4:  # offsets of gate and up, float32 and [384, 3] for each of three layers, have such a size by chance
        expected[384 * 3 * 4] += 3
    if (artifact.manifest.name, bits) == ("qwen3.5", 8):  # a mask of its chunks, float32 and [192, 64], as well
        expected[192 * 64 * 4] += 1
    found = Counter(size for size in large_constants(artifact.file("model.tflite")) if size in expected)
    assert found == expected


def weight_types(file: Path) -> Counter[str]:
    """Count the types of the different matrices of products and lookups."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(file.read_bytes(), 0)
    types = {v: k for k, v in vars(schema.TensorType).items() if isinstance(v, int)}
    wanted = {schema.BuiltinOperator.FULLY_CONNECTED, schema.BuiltinOperator.EMBEDDING_LOOKUP}
    found = {}
    for graph in model.subgraphs:
        for op in graph.operators:
            if model.operatorCodes[op.opcodeIndex].builtinCode in wanted:
                matrix = graph.tensors[op.inputs[1]]
                found[matrix.buffer] = types[matrix.type]
    return Counter(found.values())


def large_constants(file: Path) -> list[int]:
    """Sizes in bytes of the buffers that tensors of a .tflite refer to, each buffer once."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(file.read_bytes(), 0)
    used = set()
    for i in range(model.SubgraphsLength()):
        graph = model.Subgraphs(i)
        used |= {graph.Tensors(j).Buffer() for j in range(graph.TensorsLength())}
    buffers = [model.Buffers(i) for i in sorted(used)]
    return [b.Size() if b.Offset() > 1 else b.DataLength() for b in buffers]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"buckets": []}, "buckets"),
        ({"buckets": [16, 16]}, "buckets"),
        ({"buckets": [1, 16]}, "at least 2"),
        ({"buckets": [-16]}, "at least 2"),
        ({"buckets": [100]}, "multiples of 64"),
        ({"buckets": [256], "tiers": [64, 128]}, "128 tokens does not hold the largest bucket"),
        ({"tiers": []}, "capacities"),
        ({"tiers": [512, 512]}, "capacities"),
        ({"tiers": [512, 4096]}, "max_position_embeddings = 2048"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(
    source: Path, tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    def never(line: str) -> None:
        pytest.fail(f"work began: {line}")

    with pytest.raises(BuildError, match=message):
        builder.build(CONVERTER, Source.open(source), tmp_path / "out", name="x", progress=never, **asked)
    assert not list(tmp_path.iterdir())


def test_stop_tokens_outside_the_vocabulary_are_refused(source: Path, tmp_path: Path) -> None:
    opened = Source.open(source)
    beyond = Source(**{f: getattr(opened, f) for f in opened.__dataclass_fields__} | {"stop_tokens": (2, 384)})
    with pytest.raises(SourceError, match=r"\[384\] are outside the vocabulary of 384"):
        builder.build(CONVERTER, beyond, tmp_path / "out", name="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens": [{"id": 384, "content": "<more>"}]}, "ids up to 384 and config.json says vocab_size = 384"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
        ({"model": None}, "is not a tokenizer.json"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_a_build(
    source: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    opened = Source.open(shutil.copytree(source, tmp_path / "source"))
    file = tmp_path / "source" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    change = {k: tokenizer[k] + [v[0] | flags] if k == "added_tokens" else v for k, v in change.items()}
    file.write_text(json.dumps(tokenizer | change))
    with pytest.raises(SourceError, match=message):
        builder.build(CONVERTER, opened, tmp_path / "out", name="x", progress=pytest.fail)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_an_artifact_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BuildError, match="exists already"):
        builder.build(CONVERTER, Source.open(source), tmp_path / "out", name="x")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"buckets": "16;64"}, "--buckets '16;64'"),
        ({"context": "8k"}, "--context '8k'"),
        ({"runtime": "tpu"}, "no runtime is named 'tpu'"),
        ({"name": "../x"}, "'../x' cannot be a model's name"),
        ({"name": "taken"}, "--force"),
    ],
)
def test_the_command_refuses(source: Path, tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    (tmp_path / "taken" / "litert-cpu-int8").mkdir(parents=True)
    with pytest.raises(BuildFailed) as failure:
        command(str(source), models_dir=tmp_path, quant=Quant.int8, **asked)
    assert message in str(failure.value)


def test_ctrl_c_leaves_nothing(source: Path, tmp_path: Path) -> None:
    arguments = ["build", str(source), "--buckets", "16", "--context", "64", "--models-dir", str(tmp_path)]
    # A shell that starts the tests in the background has them ignore SIGINT, and their children with them.
    heard = [
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(*eval(sys.argv[1]))",
    ]
    command_line = [sys.executable, "-u", "-m", "ssmd", *arguments]
    process = subprocess.Popen(
        [*heard, repr((sys.executable, command_line))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("export"):
            assert list((tmp_path / "tiny").glob(".*/artifact/golden.safetensors"))
            process.send_signal(signal.SIGINT)
            break
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert not (tmp_path / "tiny").exists()


def test_a_ctrl_c_that_a_converter_swallows_stops_the_next_stage(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converters import optional packages under a bare `except`."""

    def swallowing(*_: object) -> tuple[None, dict[str, Any]]:
        try:
            signal.raise_signal(signal.SIGINT)
        except:  # noqa: E722 - as theirs are
            return None, {}
        raise AssertionError("no KeyboardInterrupt came")

    monkeypatch.setattr(builder, "_write", swallowing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            command(str(source), quant=Quant.int8, buckets="16", context="64", models_dir=tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "tiny").exists()


def test_q_and_k_are_put_back_in_order() -> None:
    """llama.cpp stores rows of a head as (0, D/2, 1, D/2 + 1, ...)."""
    heads, size, hidden = 3, 8, 5
    weight = np.arange(heads * size * hidden, dtype=np.float32).reshape(heads * size, hidden)
    order = [h * size + half * size // 2 + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    np.testing.assert_array_equal(smollm2._unpermuted(weight[order], heads), weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_smollm2_knows_the_capital_of_france(tmp_path: Path) -> None:
    """Weights, tokenizer and template of the package, through the re-authored module."""
    gguf = smollm2.installed_gguf()
    if gguf is None:
        pytest.skip(f"{smollm2.PACKAGE} is not installed: scripts/setup installs it for tests")
    from tokenizers import Tokenizer

    from ssmd.authoring.host import Host
    from ssmd.authoring.model import author

    smollm2.write_source(gguf, tmp_path)
    source = Source.open(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 30
    assert source.stop_tokens == (0, 2)
    family = family_of(source.config)
    config = family.parse(source.config)
    bound = {name: binding(source) for name, binding in family.bindings(config).items()}
    tokenizer = Tokenizer.from_str(source.tokenizer_json.decode())
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    host = Host(author(family, config, bound, 64))
    logits = host.feed(tokenizer.encode(prompt).ids, 32)
    answer = []
    for _ in range(7):
        answer.append(int(logits.argmax()))
        logits = host.feed(answer[-1:], 1)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
