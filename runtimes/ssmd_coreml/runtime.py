"""The Core ML runtime: artifacts of one package with a function for decode and each prefill length."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import numpy as np

from ssmd.machine.threads import default_threads
from ssmd.runtime.hoststate.graph import GraphError, Tensor
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.hoststate.signatures import signature_name
from ssmd.runtime.protocol import Device, ProgramError, RuntimeUnavailable, check_threads
from ssmd.runtime.trial import probed
from ssmd_coreml import library
from ssmd_coreml.backend import COMPUTE_UNITS, Backend, CoreML, Function, Units, system_folder
from ssmd_coreml.graph import CoreMLGraph
from ssmd_coreml.package import Interface, Package
from ssmd_coreml.program import StatefulProgram
from ssmd_coreml.stacks import STATE_DTYPE, stacks

if TYPE_CHECKING:
    from ssmd.model.artifact import Artifact, Manifest

log = logging.getLogger(__name__)
MODEL = "model.mlpackage"
TRIAL = (sys.executable, "-m", "ssmd_coreml.trial")  # which loads an artifact for the first time
INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
DEVICES: dict[Units, str] = {
    "gpu": "Apple GPU and processor",
    "cpu": "Apple processor",
    "ane": "Apple Neural Engine and processor; an artifact is tried there first",
}


class CoreMLRuntime:
    name = "coreml"

    def __init__(self, backend: Backend | None = None, *, probe: bool = True) -> None:
        """backend: executes packages; None: Core ML.

        probe: try the first load on the Neural Engine in a process of its own.
        """
        if backend is None and library.macos() is not None:
            library.package_version()
        self._backend: Backend = CoreML() if backend is None else backend
        self._probe = probe

    def devices(self) -> list[Device]:
        why_not = self._backend.problem()
        return [Device(name, description, why_not) for name, description in DEVICES.items()]

    def check(self) -> None:
        """Import the packages of a load, which takes seconds. Raises RuntimeUnavailable."""
        if library.macos() is not None:
            library.coremltools()

    def load(
        self, artifact: Artifact, *, device: str | None = None, threads: int | None = None
    ) -> StatefulProgram | FlatProgram:
        """Load on `device`: "gpu" (the default), "cpu" or "ane". If an artifact fails on "ane", "gpu" is used.

        threads: has no effect, as Core ML chooses its own. Raises ProgramError if the artifact is for another runtime,
        or its package does not match its manifest, and RuntimeUnavailable for a device that is not here.
        """
        manifest = artifact.manifest
        if manifest.runtime != self.name:
            raise ProgramError(f"artifact {artifact.path} is for the runtime {manifest.runtime!r}, not {self.name!r}")
        check_threads(threads)
        why = {d.name: d.why_not for d in self.devices()}.get(device or "gpu", "there is no such device")
        if why:
            raise RuntimeUnavailable(f"runtime {self.name!r} cannot use device {device or 'gpu'!r}: {why}")
        [units] = [u for u in COMPUTE_UNITS if u == (device or "gpu")]
        if units == "ane" and self._probe:
            units = self._probed(artifact)
        stateful = manifest.conversion.get("variant") != "stateless"
        try:
            interfaces = Package(artifact.path / MODEL).functions
            _check(interfaces, manifest, stateful)
            functions = self._backend.load(artifact.path / MODEL, tuple(interfaces), units, manifest.build)
            return self._program(functions, interfaces, manifest, units, stateful)
        except GraphError as err:
            raise ProgramError(f"artifact {artifact.path} cannot be loaded ({err}); build it again") from err

    def _program(
        self,
        functions: dict[str, Function],
        interfaces: dict[str, Interface],
        manifest: Manifest,
        units: Units,
        stateful: bool,
    ) -> StatefulProgram | FlatProgram:
        """Put the functions together into a program. Raises GraphError."""
        producer, threads = f"coreml {self._backend.identity(units)}", default_threads()
        program: StatefulProgram | FlatProgram
        if stateful:
            program = StatefulProgram(functions, manifest, producer, threads)
        else:
            program = FlatProgram(CoreMLGraph(functions, interfaces), manifest, producer, threads)
        try:
            program.self_test()
        except GraphError:
            program.close()
            raise
        return program

    def _probed(self, artifact: Artifact) -> Units:
        """Return the compute unit for an artifact that is requested on the Neural Engine, after its trial load."""
        folder = system_folder(artifact.manifest.build) / "ane"
        verdict = probed(TRIAL, artifact, "ane", folder)
        if verdict.passed:
            return "ane"
        log.warning(
            "%s runs on the GPU: it was tried on the Neural Engine and %s (remove %s to have it tried again)",
            artifact.manifest.name,
            verdict.why,
            folder,
        )
        return "gpu"


def _check(interfaces: dict[str, Interface], manifest: Manifest, stateful: bool) -> None:
    """Check that the package has every function, and that a stateful one matches its manifest. Raises GraphError.

    The tensors of a stateless one are checked by its program.
    """
    wanted = [signature_name(n, 0, 0) for n in (1, *manifest.buckets)]
    missing = [name for name in wanted if name not in interfaces]
    if missing:
        raise GraphError(f"{MODEL} has no function {missing[0]!r}, it has: {', '.join(sorted(interfaces)) or 'none'}")
    if not stateful:
        return
    states = {s.name: Tensor(s.shape, STATE_DTYPE) for s in stacks(manifest.spec, manifest.context or 1)}
    for name, length in zip(wanted, (1, *manifest.buckets), strict=True):
        expected = Interface(
            {"tokens": Tensor((1, length), INT32), "pos": Tensor((1,), INT32), "n_valid": Tensor((1,), INT32)},
            {"logits": Tensor((1, manifest.vocabulary), FLOAT32)},
            states,
        )
        found = interfaces[name]
        for what in ("inputs", "outputs", "states"):
            have, want = getattr(found, what), getattr(expected, what)
            for key in sorted(have.keys() | want.keys()):
                if have.get(key) != want.get(key):
                    raise GraphError(
                        f"function {name!r}: of its {what} {key!r} is {have.get(key)}, the manifest says "
                        f"{want.get(key)}"
                    )
