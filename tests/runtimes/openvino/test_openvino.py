"""The OpenVINO runtime itself: loading, devices, shared memory, compiled models that are kept, no telemetry."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flat_programs import altered, conversation, mapped, silent, stale

from ssmd.machine.memory import drop_mapped
from ssmd.machine.processor import cpu_name
from ssmd.model.artifact import Artifact, ArtifactError
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.protocol import ProgramError, RuntimeUnavailable
from ssmd_openvino import library
from ssmd_openvino.compile import Compiler, compile_model, identity
from ssmd_openvino.devices import devices
from ssmd_openvino.graph import OpenVINOCall, OpenVINOGraph
from ssmd_openvino.runtime import ON_CPU, OPEN, WEIGHTS, OpenVINORuntime


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "openvino"


@pytest.fixture
def granite(artifacts: Mapping[str, Path]) -> Artifact:
    return Artifact.open(artifacts["openvino-granite-f32"])


def with_model(artifact: Artifact, folder: Path, old: str, new: str) -> Artifact:
    """A copy whose IR was edited by hand, and which is sealed again."""
    shutil.copytree(artifact.path, folder)
    file = folder / f"{OPEN}.xml"
    text = file.read_text()
    edited, count = re.subn(old, new, text)
    assert count
    file.write_text(edited)
    return altered(artifact, folder)


# loading


def test_one_model_serves_every_length(granite: Artifact) -> None:
    program = OpenVINORuntime().load(granite)
    assert isinstance(program.graph, OpenVINOGraph)
    assert granite.manifest.tiers == (64, 512)
    assert len(program.graph.signatures) == 6  # decode and two buckets, in two tiers
    assert len({id(m) for m in program.graph._compiled.values()}) == 1
    assert sorted(n for n in granite.manifest.files if n.startswith(OPEN)) == [WEIGHTS, f"{OPEN}.xml"]
    assert f"openvino {library.package_version()}; cpu {cpu_name()}; {program.threads} threads" == program.producer


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"runtime": "litert"}, "is for the runtime 'litert'"),
        ({"builders": {"openvino": "2031.2.0"}}, r"built with OpenVINO 2031.2.0, .* pip install 'openvino>=2031.2.0'"),
        ({"vocabulary": 999}, "'logits' is .* build the artifact again"),
    ],
)
def test_what_does_not_fit_is_refused(granite: Artifact, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        OpenVINORuntime().load(altered(granite, tmp_path / "other", **changed))


@pytest.mark.parametrize("threads", [0, 257])
def test_thread_counts_out_of_range(granite: Artifact, threads: int) -> None:
    with pytest.raises(ProgramError, match=f"threads must be between 1 and 256, not {threads}"):
        OpenVINORuntime().load(granite, threads=threads)


@pytest.mark.parametrize(("device", "said"), [("tpu", "no such device"), ("gpu", "GPU"), ("npu", "Core Ultra")])
def test_a_device_that_is_not_here(granite: Artifact, device: str, said: str) -> None:
    with pytest.raises(RuntimeUnavailable, match=f"cannot use device '{device}': .*{said}"):
        OpenVINORuntime().load(granite, device=device)


def test_an_npu_takes_no_open_lengths(granite: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shown(tmp_path, "dev/accel/accel0")
    monkeypatch.setattr("ssmd_openvino.runtime.devices", lambda core: devices(_Core("CPU", "NPU"), tmp_path))
    with pytest.raises(RuntimeUnavailable, match=r"fixed shapes only.*ssmd build --runtime npu"):
        OpenVINORuntime().load(granite, device="npu")


def test_an_ir_edited_by_hand_is_noticed(granite: Artifact, tmp_path: Path) -> None:
    shutil.copytree(granite.path, tmp_path / "m")
    with (tmp_path / "m" / f"{OPEN}.xml").open("a") as f:
        f.write("<!-- -->")
    with pytest.raises(ArtifactError, match=rf"{OPEN}.xml"):
        Artifact.open(tmp_path / "m")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<layers>", "<layers", "cannot be loaded"),
        ('type="MatMul"', 'type="MatMuul"', r"cannot be loaded \(OpenVINO cannot load model.xml on CPU: .*MatMuul"),
        (r'offset="\d+"', 'offset="99999999999"', "cannot be loaded"),
        ('names="pos"', 'names="at"', r"a tensor is named \['at'.*\]; known are \['tokens', 'pos', 'n_valid', "),
    ],
)
def test_a_sealed_ir_that_is_none(granite: Artifact, tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        OpenVINORuntime().load(with_model(granite, tmp_path / "m", old, new))


@pytest.mark.parametrize("broken", [stale(OpenVINOGraph), silent(OpenVINOGraph)])
def test_memory_that_is_not_shared_is_noticed(
    granite: Artifact, broken: type[OpenVINOGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssmd_openvino.runtime.OpenVINOGraph", broken)
    with pytest.raises(ProgramError, match=r"does not run on cpu here .*self-test of shared memory"):
        OpenVINORuntime().load(granite)


def test_a_failed_run_leaves_the_handle_as_it_was(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    program = OpenVINORuntime().load(granite)
    handles = [program.new_state() for _ in range(2)]
    for i, handle in enumerate(handles):
        program.prefill(handle, [i] * 20)
    expected = [program.decode([program.clone(h)], [7])[0] for h in handles]
    run, runs = OpenVINOCall.run, []

    def failing(call: OpenVINOCall) -> None:
        runs.append(call)
        run(call)
        if len(runs) == 2:
            raise GraphError("the second run breaks")

    with monkeypatch.context() as patch:
        patch.setattr(OpenVINOCall, "run", failing)
        with pytest.raises(GraphError):
            program.decode(handles, [7, 7])
    assert [program.position(h) for h in handles] == [20, 20]
    assert np.array_equal(program.decode(handles, [7, 7]), expected)


def test_only_openvino_takes_subnormal_numbers_for_zero(tmp_path: Path) -> None:
    """Products of them take several times as long, and decays come down to them."""
    openvino = library.openvino()
    ops = importlib.import_module("openvino.opset13")
    x = ops.parameter([1, -1, 64], np.float32)
    openvino.save_model(openvino.Model([ops.multiply(x, np.float32(0.5))], [x]), tmp_path / "m.xml")
    tiny = np.full((1, 8, 64), 1e-39, np.float32)

    def halves() -> bool:
        request = model.create_infer_request()
        request.set_input_tensor(0, openvino.Tensor(tiny))
        OpenVINOCall(request).run()
        return bool(request.get_output_tensor(0).data.any())

    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(tiny.any).result()  # a thread from before
        model = Compiler(openvino.Core(), "CPU", ON_CPU, None).compiled(tmp_path / "m.xml", tmp_path / "m.bin")
        assert not halves()
        assert not elsewhere.submit(halves).result()
        assert elsewhere.submit(lambda: (tiny * np.float32(0.5)).any()).result()
    assert (tiny * np.float32(0.5)).any()
    core = openvino.Core()
    compile_model(core, core.read_model(tmp_path / "m.xml"), "CPU", ON_CPU)
    assert (tiny * np.float32(0.5)).any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_the_weights_file_are_given_back(artifacts: Mapping[str, Path], tmp_path: Path) -> None:
    """The file's pages are not resident once the weights are packed, and a read brings them back."""
    (tmp_path / "link").symlink_to(artifacts["openvino-llama-f32"])  # the system tells the names behind links
    artifact = Artifact.open(tmp_path / "link")
    program = OpenVINORuntime().load(artifact)
    assert mapped(artifact.file(WEIGHTS)) == 0
    expected = conversation(program)
    drop_mapped(artifact.file(WEIGHTS))
    assert conversation(program) == expected


# devices


class _Core:
    """As much of an openvino.Core as tells what is here."""

    def __init__(self, *found: str) -> None:
        self._found = found

    def get_property(self, device: str, name: str) -> object:
        if device not in self._found:
            raise RuntimeError(f"Device with {device!r} name is not registered in the OpenVINO Runtime")
        return [""] if name == "AVAILABLE_DEVICES" else f"Intel {device}"


def _shown(root: Path, *nodes: str) -> None:
    for node in nodes:
        (root / node).parent.mkdir(parents=True, exist_ok=True)
        (root / node).touch()


def test_devices_that_are_here(tmp_path: Path) -> None:
    _shown(tmp_path, "dev/dri/renderD128", "dev/accel/accel0")
    found = {d.name: d for d in devices(_Core("CPU", "GPU", "NPU"), tmp_path)}
    assert [d.why_not for d in found.values()] == ["", "", ""]
    assert found["npu"].description.startswith("Intel NPU")
    assert "never executed" in found["npu"].description


@pytest.mark.skipif(sys.platform != "linux", reason="what is said about Linux")
def test_openvino_is_not_asked_of_what_linux_does_not_show(tmp_path: Path) -> None:
    assert [bool(d.why_not) for d in devices(_Core("CPU", "GPU", "NPU"), tmp_path)] == [False, True, True]
    _shown(tmp_path, "dev/dxg")
    assert [bool(d.why_not) for d in devices(_Core("CPU", "GPU", "NPU"), tmp_path)] == [False, False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="what is said about Linux")
def test_what_an_npu_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str:
        return {d.name: d.why_not for d in devices(_Core("CPU"), tmp_path)}["npu"]

    assert "no /dev/accel/accel*" in why()
    assert "intel_vpu" in why()
    _shown(tmp_path, "dev/accel/accel0")
    assert "install intel-level-zero-npu and intel-driver-compiler-npu" in why()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "usermod -aG render" in why()


# compiled models that are kept


@pytest.fixture
def compiler(granite: Artifact) -> Compiler:
    properties = {**ON_CPU, "INFERENCE_NUM_THREADS": 1}
    return Compiler(library.openvino().Core(), "CPU", properties, granite.manifest.build)


def compiled(compiler: Compiler, artifact: Artifact) -> list[bytes]:
    """Return the outputs of the compiled model."""
    model = compiler.compiled(artifact.file(f"{OPEN}.xml"), artifact.file(WEIGHTS))
    states = [t.name for t in artifact.manifest.spec.tensors]
    graph = OpenVINOGraph({"decode": model}, {"decode": (1, 64)}, states)
    noise = np.random.default_rng(1)
    inputs = {n: noise.standard_normal(t.shape).astype(t.dtype) for n, t in graph.signatures["decode"].inputs.items()}
    inputs |= {"tokens": np.array([[5]], np.int32), "pos": np.array([9], np.int32), "n_valid": np.array([1], np.int32)}
    return [a.tobytes() for a in graph.run_managed("decode", inputs).values()]


def blobs(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.blob"))


def test_a_compiled_model_is_kept(
    compiler: Compiler, granite: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(compiler, granite)
    [blob] = blobs(cache)
    assert blob.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(Compiler, "_compile", lambda *_: pytest.fail("compiled again"))
        assert compiled(compiler, granite) == first


@pytest.mark.parametrize("damage", ["flipped", "cut", "no seal"])
def test_a_damaged_blob_is_compiled_again(compiler: Compiler, granite: Artifact, cache: Path, damage: str) -> None:
    first = compiled(compiler, granite)
    [blob] = blobs(cache)
    content = blob.read_bytes()
    if damage == "flipped":
        blob.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage == "cut":
        blob.write_bytes(content[:-1])
    else:
        blob.with_suffix(".json").unlink()
    assert compiled(compiler, granite) == first
    assert len(blobs(cache)) == 1
    assert blob.with_suffix(".json").is_file()


def test_a_blob_that_the_device_refuses_is_compiled_again(
    compiler: Compiler, granite: Artifact, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of another platform or driver whose name is the same: it is whole, and no blob of this device's."""
    first = compiled(compiler, granite)
    [blob] = blobs(cache)
    content = b"ELF of another platform" * 1000
    blob.write_bytes(content)
    blob.with_suffix(".json").write_text(
        json.dumps({"size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    )
    with caplog.at_level(logging.WARNING):
        assert compiled(compiler, granite) == first
    assert "CPU refuses" in caplog.text
    assert "compiling the model again" in caplog.text
    assert blob.read_bytes() != content


def test_blobs_of_drivers_that_are_gone_go(granite: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, properties = library.openvino().Core(), {**ON_CPU, "INFERENCE_NUM_THREADS": 1}
    compiled(Compiler(core, "CPU", properties, granite.manifest.build), granite)
    [old] = blobs(cache)
    monkeypatch.setattr("ssmd_openvino.compile.identity", lambda *_: "another driver")
    compiled(Compiler(core, "CPU", properties, granite.manifest.build), granite)
    [new] = blobs(cache)
    assert new.parent != old.parent
    assert new.parent.parent == old.parent.parent


def test_a_cache_folder_that_cannot_be_made(
    granite: Artifact, compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("")
    with caplog.at_level(logging.WARNING):
        assert compiled(compiler, granite)
    assert "each load compiles the model again" in caplog.text


def test_an_identity_names_library_and_device() -> None:
    text = identity(library.openvino().Core(), "CPU")
    assert text.startswith("openvino 2026.")
    assert "FULL_DEVICE_NAME" in text


# telemetry

CONVERT = """
import time, torch
if __name__ == "__main__":
    model = openvino.convert_model(torch.nn.Linear(128, 128).eval(), example_input=torch.zeros(1, 128))
    nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    time.sleep(1)
"""
OURS = "from ssmd_openvino import library\nopenvino, nncf = library.openvino(), library.nncf()\n"
THEIRS = "import openvino, nncf\n"


@contextmanager
def proxy() -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that takes down what it is asked for, and its port."""
    asked: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client = server.accept()[0]
            except OSError:
                return
            with client:
                asked.append(client.recv(200))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1], asked
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)


@pytest.mark.parametrize(
    ("imports", "silent"),
    # Theirs shows that the test would see it: of a new version of the library, not of a change here.
    [pytest.param(OURS, True, id="ours"), pytest.param(THEIRS, False, id="theirs", marks=pytest.mark.full)],
)
def test_the_library_tells_nobody(tmp_path: Path, imports: str, silent: bool) -> None:
    """Imported as its makers mean it to be, it sends usage statistics unasked: this test would see them."""
    left_out = ("CI", "NNCF_CI", "TF_BUILD", "JENKINS_URL")
    with proxy() as (port, asked):
        around = {k: v for k, v in os.environ.items() if k not in left_out} | {"HOME": str(tmp_path)}
        around |= dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), f"http://127.0.0.1:{port}")
        done = subprocess.run(
            [sys.executable, "-c", imports + CONVERT], env=around, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert bool(asked) is not silent
    assert bool(list(tmp_path.iterdir())) is not silent  # nor does it leave an identity in the home folder
