"""Core ML but for Apple's execution: what is built, what a program does over MLState, what is refused and said here.

Programs run through the evaluator of packages (tests/mil), which was written from the format's specification.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import commands
import evaluated
import numpy as np
import oracle
import pytest
import tiny
import torch
from conftest import ROOT, TinyArtifacts
from contract.driving import error, feed
from evaluated import Evaluator, runtime_of
from flat_programs import altered
from mil import package as evaluator
from mil.model import Model, open_package
from mil.program import Program
from numpy.typing import NDArray
from typer.testing import CliRunner

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.build.builder import BuildError, Target
from ssmd.cli import app
from ssmd.families.registry import family_of
from ssmd.model.artifact import Artifact, ArtifactError
from ssmd.model.source import Source
from ssmd.runtime.execution import execute
from ssmd.runtime.protocol import ProgramError, RuntimeUnavailable, StateLost, get_runtime
from ssmd.runtime.verify import verify
from ssmd_coreml import doctor, library, runtime
from ssmd_coreml.backend import NOT_HERE, Function, Units
from ssmd_coreml.build import varied
from ssmd_coreml.lint import RULES, lint
from ssmd_coreml.package import Package
from ssmd_coreml.program import StatefulProgram
from ssmd_coreml.runtime import MODEL, CoreMLRuntime

HALF = 1e-2  # rms of a step in standard deviations, as `ssmd verify` allows f16; measured up to 5e-4 (granite)


def proto_of(package: Path) -> Any:
    library.coremltools()
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((package / "Data/com.apple.CoreML/model.mlmodel").read_bytes())
    return spec


def edited(artifact: Artifact, folder: Path, edit: Callable[[Any], None]) -> Artifact:
    """A copy whose program was changed, sealed as if it had been built so."""
    shutil.copytree(artifact.path, folder)
    spec = proto_of(folder / MODEL)
    edit(spec)
    (folder / MODEL / "Data/com.apple.CoreML/model.mlmodel").write_bytes(spec.SerializeToString())
    return altered(artifact, folder)


def block(spec: Any, function: str) -> Any:
    found = spec.mlProgram.functions[function]
    return found.block_specializations[found.opset]


# what is built


def test_functions_share_their_weights(artifacts: TinyArtifacts) -> None:
    for name in ("coreml-granite-f16", "coreml-granite-int8", "coreml-granite-f32"):
        path = artifacts[name] / MODEL
        package = Package(path)
        assert sorted(package.functions) == ["decode", "prefill_16", "prefill_64"]
        each = {f: package.constants(f) for f in package.functions}
        shared = set.intersection(*(set(places) for places in each.values()))
        decode = sum(each["decode"].values())
        assert sum(each["decode"][place] for place in shared) > 0.95 * decode
        stored = (path / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
        assert decode <= stored < 1.15 * decode + 64 * 64 * 4 * 4  # masks of 64 tokens
        # The evaluator counts on its own.
        assert {f: Model(path, f).weight_bytes for f in package.functions} == {
            f: sum(places.values()) for f, places in each.items()
        }


def test_quantized_weights_are_a_quarter_of_float16(artifacts: TinyArtifacts) -> None:
    packages = {q: Package(artifacts[f"coreml-llama-{q}"] / MODEL) for q in ("f16", "int8", "int4")}
    size = {q: sum(package.constants("decode").values()) for q, package in packages.items()}
    assert size["int8"] < 0.6 * size["f16"]
    assert size["int4"] < 0.8 * size["int8"]


def test_interfaces(artifacts: TinyArtifacts) -> None:
    stateful = Package(artifacts["coreml-granite-f16"] / MODEL).functions["prefill_16"]
    assert {n: str(t.dtype) for n, t in stateful.inputs.items()} == dict.fromkeys(("tokens", "pos", "n_valid"), "int32")
    assert {n: str(t.dtype) for n, t in stateful.outputs.items()} == {"logits": "float32"}
    assert {n: str(t.dtype) for n, t in stateful.states.items()} == dict.fromkeys(
        ("conv_state", "ssm_state", "key_state", "value_state"), "float16"
    )
    stateless = Package(artifacts["coreml-granite-f32"] / MODEL).functions["prefill_16"]
    assert not stateless.states
    assert {str(t.dtype) for n, t in {**stateless.inputs, **stateless.outputs}.items()} == {"float32", "int32"}


def test_no_state_is_copied_to_be_written(artifacts: TinyArtifacts) -> None:
    package = Package(artifacts["coreml-granite-f16"] / MODEL)
    for function in package.functions:
        counts = package.counted(function)
        assert counts["read_state"] == counts["write_state"] == 4
        assert "slice_update" not in counts


@pytest.mark.parametrize(
    "name", [pytest.param("coreml-llama-int8", marks=pytest.mark.full), "coreml-granite-int8", "coreml-llama-int4"]
)
def test_quantized_against_pytorch_with_the_same_weights(name: str, artifacts: TinyArtifacts) -> None:
    """The module gets the weights of the package, so that their quantization does not count."""
    artifact = Artifact.open(artifacts[name])
    source = Source.open(artifacts.source(name))
    family = family_of(source.config)
    config = family.parse(source.config)
    parameters = {n: bind(source) for n, bind in family.bindings(config).items()}
    dequantized = weights_of(artifact.path / MODEL)
    assert len(dequantized) > 10
    changed = 0
    for parameter, array in dequantized.items():
        assert parameters[parameter].shape == array.shape
        off = np.abs(parameters[parameter] - array).max() / np.abs(parameters[parameter]).max()
        assert off < (0.1 if name.endswith("int4") else 0.01)
        changed += off > 1e-3
        parameters[parameter] = array
    assert changed > 10
    host = Host(author(family, config, parameters, 512), 512)
    program = runtime_of("coreml").load(artifact)
    ids = np.random.default_rng(3).integers(0, program.vocabulary, 90).tolist()
    handle = program.new_state()
    expected = [host.feed(ids[:64], 64), host.feed(ids[64:73], 16), *(host.feed([i], 1) for i in ids[73:])]
    found = [program.prefill(handle, ids[:64]), program.prefill(handle, ids[64:73])]
    found += [program.decode([handle], [i])[0] for i in ids[73:]]
    assert error(np.stack(found), np.stack(expected)) <= 2e-2  # the worst single logit; measured 0.9e-2
    state, wanted = program.save(handle), host.state()
    for tensor, array in wanted.tensors.items():
        scale = array.std() + np.abs(array)
        assert (np.abs(state.tensors[tensor] - array) / scale).max() <= 2e-2, tensor


def weights_of(package: Path) -> dict[str, NDArray[np.float32]]:
    """Parameters as a package's quantized constants give them, by their own names."""
    read = evaluator.Package(package)
    found = {}
    for name, constant in Program(read, read.function("decode")).constants.items():
        if name.startswith("module_") and name.endswith("_to_fp16_quantized"):
            found[name.removeprefix("module_").removesuffix("_to_fp16_quantized")] = np.asarray(
                constant.value, np.float32
            )
    return found


# mutations: what the evaluator is there to see


def drop_write(spec: Any) -> None:
    operations = block(spec, "decode").operations
    del operations[next(i for i, o in enumerate(operations) if o.type == "write_state")]


def swap_operands(spec: Any) -> None:
    op = next(o for o in block(spec, "prefill_16").operations if o.type == "sub")
    x, y = op.inputs["x"].arguments[0].name, op.inputs["y"].arguments[0].name
    op.inputs["x"].arguments[0].name, op.inputs["y"].arguments[0].name = y, x


def other_activation(spec: Any) -> None:
    next(o for o in block(spec, "decode").operations if o.type == "silu").type = "sigmoid"


def older_state(spec: Any) -> None:
    """A layer's state goes where another's does: the order of what is stacked."""
    ops = [o for o in block(spec, "decode").operations if o.type == "concat"]
    stacked = next(o for o in ops if len(o.inputs["values"].arguments) == 3 and "fp16" in o.outputs[0].name)
    first, second = stacked.inputs["values"].arguments[0].name, stacked.inputs["values"].arguments[1].name
    stacked.inputs["values"].arguments[0].name, stacked.inputs["values"].arguments[1].name = second, first


@pytest.mark.parametrize("mutate", [swap_operands, other_activation, older_state])
def test_a_wrong_program_is_seen(mutate: Callable[[Any], None], artifacts: TinyArtifacts, tmp_path: Path) -> None:
    artifact = Artifact.open(artifacts["coreml-granite-f16"])
    report = verify(artifact, runtime_of("coreml").load(artifact))
    assert report.passed
    assert report.worst.rms_relative <= HALF
    wrong = edited(artifact, tmp_path / "wrong", mutate)
    report = verify(wrong, runtime_of("coreml").load(wrong))
    assert not report.passed
    assert report.worst.rms_relative > 3 * HALF


def test_a_state_that_no_step_writes_is_seen(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the load, and by the golden values were it not."""
    wrong = edited(Artifact.open(artifacts["coreml-granite-f16"]), tmp_path / "wrong", drop_write)
    with pytest.raises(ProgramError, match="a step left conv_state as it was"):
        runtime_of("coreml").load(wrong)
    monkeypatch.setattr(StatefulProgram, "self_test", lambda self: None)
    assert verify(wrong, runtime_of("coreml").load(wrong)).worst.rms_relative > 3 * HALF


def test_corrupted_weights_are_seen(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    artifact = Artifact.open(artifacts["coreml-granite-f16"])
    shutil.copytree(artifact.path, tmp_path / "wrong")
    file = tmp_path / "wrong" / MODEL / "Data/com.apple.CoreML/weights/weight.bin"
    content = bytearray(file.read_bytes())
    content[200_000:200_064] = b"\x3c" * 64  # 32 weights of 1.06
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"weight\.bin.*altered"):
        Artifact.open(tmp_path / "wrong")
    wrong = altered(artifact, tmp_path / "wrong")
    assert not verify(wrong, runtime_of("coreml").load(wrong)).passed


def test_another_functions_shapes_are_refused(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    artifact = Artifact.open(artifacts["coreml-granite-f16"])

    def exchange(spec: Any) -> None:
        for function in spec.description.functions:
            function.name = {"prefill_16": "prefill_64", "prefill_64": "prefill_16"}.get(function.name, function.name)

    with pytest.raises(ProgramError, match=r"'prefill_16': of its inputs 'tokens' is .*\(1, 64\).*\(1, 16\)"):
        runtime_of("coreml").load(edited(artifact, tmp_path / "wrong", exchange))


# bad input


@contextmanager
def unannounced(_: str) -> Iterator[None]:
    yield


def test_what_cannot_be_built_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    odd: Any = torch.nn.Module()  # of which only the parameters are looked at
    odd.layer0_in = torch.nn.Parameter(torch.zeros(200, 33))
    with pytest.raises(BuildError, match=r"layer0_in has rows that are no multiple of 32 values.*--quant int8"):
        varied("stateful").write(odd, Target("int4", (16,), (64,)), tmp_path, unannounced)
    with pytest.raises(BuildError, match=r"capacities \[64, 512\].*share one"):
        varied("stateless").write(odd, Target("int8", (16,), (64, 512)), tmp_path, unannounced)
    with pytest.raises(ValueError, match="no variant 'x'; there are: stateful, stateless"):
        varied("x")
    assert not list(tmp_path.iterdir())


def test_a_function_missing(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    artifact = Artifact.open(artifacts["coreml-granite-f16"])

    def drop(spec: Any) -> None:
        del spec.description.functions[[f.name for f in spec.description.functions].index("decode")]

    with pytest.raises(ProgramError, match="has no function 'decode', it has: prefill_16, prefill_64"):
        runtime_of("coreml").load(edited(artifact, tmp_path / "wrong", drop))


def test_a_package_that_is_none(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    artifact = Artifact.open(artifacts["coreml-granite-f16"])
    shutil.copytree(artifact.path, tmp_path / "wrong")
    (tmp_path / "wrong" / MODEL / "Data/com.apple.CoreML/model.mlmodel").write_bytes(b"\xff" * 100)
    with pytest.raises(ArtifactError, match=r"altered|bytes"):
        Artifact.open(tmp_path / "wrong")
    with pytest.raises(ProgramError, match=r"model\.mlpackage cannot be read"):
        runtime_of("coreml").load(altered(artifact, tmp_path / "wrong"))


def test_here_it_says_what_to_do(artifacts: TinyArtifacts) -> None:
    devices = get_runtime("coreml").devices()
    assert [d.name for d in devices] == ["gpu", "cpu", "ane"]
    assert all(NOT_HERE in d.why_not and "serve them on a Mac with macOS 15" in d.why_not for d in devices)
    with pytest.raises(RuntimeUnavailable, match="Core ML cannot execute here"):
        get_runtime("coreml").load(Artifact.open(artifacts["coreml-granite-f16"]))
    done = commands.ssmd("serve", str(artifacts["coreml-granite-f16"]), "--runtime", "coreml", env=os.environ)
    assert done.returncode == 1
    assert "Core ML cannot execute here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("version", "works"), [((14, 5), False), ((15, 0), True), ((26, 1), True)])
def test_macos_before_15(version: tuple[int, ...], works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "macos", lambda: version)
    why = CoreMLRuntime().devices()[0].why_not
    assert works == (not why)
    assert works or ("macOS 14.5 is here, 15 or later is needed" in why and "--runtime litert" in why)


def test_refused_devices_and_threads(artifacts: TinyArtifacts) -> None:
    artifact = Artifact.open(artifacts["coreml-granite-f16"])
    with pytest.raises(RuntimeUnavailable, match="there is no such device"):
        runtime_of("coreml").load(artifact, device="npu")
    with pytest.raises(ProgramError, match="between 1 and 256"):
        runtime_of("coreml").load(artifact, threads=0)
    with pytest.raises(ProgramError, match="is for the runtime 'litert'"):
        runtime_of("coreml").load(Artifact.open(artifacts["granite-int8"]))


# states


class Failing(Evaluator):
    """Core ML that fails at a prediction, after it wrote to the states."""

    def __init__(self) -> None:
        self.fail = False

    def load(self, package: Path, functions: tuple[str, ...], units: Units, build: str) -> dict[str, Function]:
        outer = self

        class Broken(Model):
            def predict(self, data: Any, state: Any = None) -> Any:
                made = super().predict(data, state)
                if outer.fail:
                    raise RuntimeError("Error computing NN outputs.")
                return made

        opened = open_package(package)
        return {name: Broken(opened, name) for name in functions}


def test_a_failed_prediction_loses_its_states_and_no_others(artifacts: TinyArtifacts) -> None:
    backend = Failing()
    program = CoreMLRuntime(backend).load(Artifact.open(artifacts["coreml-granite-f16"]))
    one, two, other = (program.new_state() for _ in range(3))
    for handle in (one, two, other):
        program.prefill(handle, [1, 2, 3])
    kept = program.save(other)
    backend.fail = True
    with pytest.raises(StateLost, match=r"Error computing NN outputs.*ask once more"):
        program.decode([one, two], [4, 5])
    backend.fail = False
    for handle in (one, two):
        with pytest.raises(StateLost):
            program.decode([handle], [4])
        program.release(handle)
    assert program.save(other).tensors.keys() == kept.tensors.keys()
    assert np.isfinite(program.decode([other], [4])).all()


def test_a_state_is_rounded_to_float16_and_then_exact(artifacts: TinyArtifacts) -> None:
    artifact = Artifact.open(artifacts["coreml-granite-f16"])
    model = tiny.official("granite", artifact.manifest.vocabulary)
    program = runtime_of("coreml").load(artifact)
    ids = np.random.default_rng(1).integers(0, program.vocabulary, 50).tolist()
    _, cache = oracle.continued(model, ids)
    state = oracle.state(cache, len(ids))
    state.tensors["ssm_0"].flat[0] = 1e6  # float16 has no such number: the largest takes its place
    saved = program.save(program.restore(state))
    assert saved.tensors["ssm_0"].flat[0] == 65504
    for name, array in state.tensors.items():
        expected = np.clip(array, -65504, 65504).astype(np.float16).astype(np.float32)
        assert np.array_equal(saved.tensors[name].astype(np.float32), expected), name
    again = program.save(program.restore(saved))
    assert all(np.array_equal(again.tensors[n], saved.tensors[n]) for n in saved.tensors)


@pytest.mark.parametrize(
    ("name", "tolerance"), [("granite", 1e-2), pytest.param("llama", 1e-2, marks=pytest.mark.full), ("mamba", 1e-2)]
)
def test_half_against_transformers(name: str, tolerance: float, artifacts: TinyArtifacts) -> None:
    """Logits and states of 150 tokens, in units of the largest of their tensor."""
    artifact = Artifact.open(artifacts[f"coreml-{name}-f16"])
    program = runtime_of("coreml").load(artifact)
    ids = np.random.default_rng(11).integers(0, program.vocabulary, 150).tolist()
    logits, cache = oracle.continued(tiny.official(name, program.vocabulary), ids)
    handle = program.new_state()
    found = [feed(program, handle, ids[:101], [64, 16, 7, 14])]
    found += [program.decode([handle], [i])[0] for i in ids[101:]]
    expected = logits[100:]
    assert np.abs(np.stack(found) - expected).max() <= tolerance * np.abs(expected).max()
    state, wanted = program.save(handle), oracle.state(cache, len(ids))
    for tensor, array in wanted.tensors.items():
        assert np.abs(state.tensors[tensor] - array).max() <= tolerance * np.abs(array).max(), tensor


# the Neural Engine: the linter and the probe


def test_the_linter_passes_what_keeps_to_its_rules(tmp_path: Path) -> None:
    """A program of coremltools' own making: float16, four dimensions, convolutions of 1x1, widths of 32."""
    ct = library.coremltools()
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    def saved(width: int, name: str, weights: type) -> Path:
        fp = types.fp16 if weights is np.float16 else types.fp32

        @mb.program(input_specs=[mb.TensorSpec((1, width, 1, 4), dtype=fp)], opset_version=ct.target.iOS18)  # type: ignore[untyped-decorator] # of coremltools, untyped
        def program(x: Any) -> Any:
            return mb.relu(x=mb.conv(x=x, weight=np.ones((32, width, 1, 1), weights)))

        with library.quiet():
            model = ct.convert(
                program,
                minimum_deployment_target=ct.target.iOS18,
                compute_precision=ct.precision.FLOAT32,
                skip_model_load=True,
            )
            model.save(str(tmp_path / f"{name}.mlpackage"))
            functions = ct.utils.MultiFunctionDescriptor(str(tmp_path / f"{name}.mlpackage"))
            functions.default_function_name = "main"
            ct.utils.save_multifunction(functions, str(tmp_path / f"{name}-joined.mlpackage"))
        return tmp_path / f"{name}-joined.mlpackage"

    assert lint(Package(saved(64, "good", np.float16))) == []
    assert lint(Package(saved(64, "wide", np.float32))) == [f"2 {RULES[0]}"]


def test_the_manifest_says_why_not(artifacts: TinyArtifacts) -> None:
    conversion = Artifact.open(artifacts["coreml-granite-f16"]).manifest.conversion
    assert conversion["variant"] == "stateful"
    assert any(RULES[0] in reason for reason in conversion["ane"])
    assert conversion["ane"] == lint(Package(artifacts["coreml-granite-f16"] / MODEL))
    assert set(conversion["operations"]) == {"decode", "prefill_16", "prefill_64"}


def test_a_probe_that_crashes_falls_back_and_says_so(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path))
    artifact = Artifact.open(artifacts["coreml-granite-f16"])
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(runtime, "TRIAL", (sys.executable, "-c", crash))
    program = runtime_of("coreml").load(artifact, device="ane")
    assert program.producer.endswith("gpu")
    assert "runs on the GPU: it was tried on the Neural Engine and it crashed (SIGSEGV)" in caplog.text
    [verdict] = tmp_path.rglob("verdict.json")
    said = json.dumps({"passed": True, "why": ""})
    monkeypatch.setattr(runtime, "TRIAL", (sys.executable, "-c", f"print({said!r})"))
    assert runtime_of("coreml").load(artifact, device="ane").producer.endswith("gpu")  # the verdict is kept
    verdict.unlink()
    assert runtime_of("coreml").load(artifact, device="ane").producer.endswith("ane")


@pytest.mark.full
def test_the_probe_itself(artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its process: right golden values pass, others do not."""
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))
    judge = (
        "import sys; from evaluated import Evaluator; from ssmd.runtime.trial import judge; "
        "from ssmd_coreml.runtime import CoreMLRuntime; judge(CoreMLRuntime(Evaluator(), probe=False))"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setattr(runtime, "TRIAL", (sys.executable, "-c", judge))
    artifact = Artifact.open(artifacts["coreml-llama-f16"])
    assert runtime_of("coreml").load(artifact, device="ane").producer.endswith("ane")
    wrong = edited(artifact, tmp_path / "wrong", other_activation)
    assert runtime_of("coreml").load(wrong, device="ane").producer.endswith("gpu")
    assert "standard deviations off" in "".join(f.read_text() for f in tmp_path.rglob("verdict.json"))


# the doctor


def test_the_doctor_here(artifacts: TinyArtifacts) -> None:
    lines: list[str] = []
    report = doctor.look([Artifact.open(artifacts["coreml-granite-int8"])], lines.append)
    text = "\n".join(lines)
    assert "verified by an independent evaluator on Linux, not executed on Apple hardware" in text
    assert "Core ML cannot execute here" in text
    [found] = report["artifacts"]
    decode = found["functions"]["decode"]
    model = Model(artifacts["coreml-granite-int8"] / MODEL, "decode")
    assert sum(decode["operations"].values()) == sum(n for op, n in model.operations.items() if op != "const")
    assert decode["constant_bytes"] == model.weight_bytes
    assert "executed" not in found
    with pytest.raises(RuntimeUnavailable, match="Core ML has no device 'npu'; there are: gpu, cpu, ane"):
        doctor.look([], lines.append, "npu")


def test_the_doctor_where_it_executes(artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but MLComputePlan, which only a Mac has."""
    artifact = Artifact.open(artifacts["coreml-granite-int8"])
    measured = execute(artifact, "gpu", CoreMLRuntime(Evaluator(), probe=False))
    assert measured["passed"]
    assert set(measured["prefill_ms"]) == {16, 64}
    evaluated.play(monkeypatch)
    said = json.dumps({**measured, "placement": {"decode": {"MLGPUComputeDevice": 7}}})
    monkeypatch.setattr(doctor, "COMMAND", (sys.executable, "-c", f"print({said!r})"))
    lines: list[str] = []
    report = doctor.look([artifact], lines.append)
    assert report["ok"]
    assert set(report["artifacts"][0]["executed"]) == {"gpu", "cpu", "ane"}
    assert sum("golden values passed" in line for line in lines) == 3
    assert any("decode: 7 operations on MLGPUComputeDevice" in line for line in lines)
    kill = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    monkeypatch.setattr(doctor, "COMMAND", (sys.executable, "-c", kill))
    lines.clear()
    report = doctor.look([artifact], lines.append)
    assert "SIGKILL" in report["artifacts"][0]["executed"]["ane"]["problem"]
    assert not report["ok"]


def test_the_doctor_exits_with_1_for_a_broken_artifact(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m" / "coreml-gpu-int8"
    shutil.copytree(artifacts["coreml-granite-int8"], folder)
    command = ("doctor", "coreml", "--models-dir", str(tmp_path / "models"))
    assert CliRunner().invoke(app, command).exit_code == 0
    (folder / MODEL / "Manifest.json").write_text("{}")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "has 2 bytes" in done.stderr
