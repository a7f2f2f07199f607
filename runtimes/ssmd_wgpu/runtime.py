"""The wgpu runtime: packed weights and hand-written kernels on any GPU, by Vulkan, Metal, DirectX 12 or OpenGL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssmd.model.state import StateError
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.protocol import Device, ProgramError, check_threads
from ssmd_wgpu import library
from ssmd_wgpu.device import Gpu, choose_adapter, devices
from ssmd_wgpu.model import Model
from ssmd_wgpu.pack import FILE as WEIGHTS
from ssmd_wgpu.pack import VALUES, Format, Weights
from ssmd_wgpu.plan import FILE as PLAN
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.program import WgpuProgram
from ssmd_wgpu.trial import tried
from ssmd_wgpu.tuning import tuned

if TYPE_CHECKING:
    from ssmd.model.artifact import Artifact


class WgpuRuntime:
    name = "wgpu"

    def __init__(self) -> None:
        library.package_version()

    def devices(self) -> list[Device]:
        return devices()

    def load(self, artifact: Artifact, *, device: str | None = None, threads: int | None = None) -> WgpuProgram:
        """Load on `device`: "gpu", the best adapter, or one of `devices`. threads: has no effect on a GPU.

        Raises ProgramError if the artifact is for another runtime, does not match its manifest or does not fit the
        device. Raises RuntimeUnavailable for a device that is not here.
        """
        manifest = artifact.manifest
        if manifest.runtime != self.name:
            raise ProgramError(f"artifact {artifact.path} is for the runtime {manifest.runtime!r}, not {self.name!r}")
        check_threads(threads)
        for name in (PLAN, WEIGHTS):
            if not artifact.has(name):
                raise ProgramError(f"artifact {artifact.path} has no {name}; build it again")
        plan = PackedPlan.open(artifact.file(PLAN))
        half = any(t.dtype == "float16" for t in manifest.spec.rows)
        try:
            spec = plan.spec("float16" if half else "float32")
        except StateError as err:
            raise ProgramError(f"artifact {artifact.path}: its plan makes no sense, {err}; build it again") from err
        if spec.to_json() != manifest.spec.to_json():
            raise ProgramError(
                f"artifact {artifact.path}: its plan has another state than its manifest; build it again"
            )
        if plan.vocabulary != manifest.vocabulary or (manifest.context or 0) > plan.context:
            raise ProgramError(f"artifact {artifact.path}: its plan does not fit its manifest; build it again")
        parameters = plan.packed()
        Weights(artifact.file(WEIGHTS), parameters)  # before a device is asked for anything

        fmt = next((f for f in VALUES if f == manifest.quantization), None)
        if fmt is None:
            raise ProgramError(f"artifact {artifact.path} is {manifest.quantization}; there are: {', '.join(VALUES)}")
        known: Format = fmt

        def model() -> Model:
            gpu = Gpu(choose_adapter(device))
            weights = Weights(artifact.file(WEIGHTS), parameters)
            tuning = tuned(gpu, plan, known, manifest.build)
            made = Model(gpu, plan, weights, manifest.buckets[-1], half, tuning.simplified)
            if not gpu.found.software:  # what software adapters compute is tested
                made = tried(made, tuning)
                made.form_times = tuning.form_times()
            return made

        try:
            return WgpuProgram(model, manifest)
        except GraphError as err:
            raise ProgramError(f"artifact {artifact.path} does not run on {device or 'the GPU'} here: {err}") from err
