"""Models compiled for a device, and kept so that the next load need not compile them.

What is kept (a blob) fits one artifact, OpenVINO, device and driver, all of which are in its name. The model itself
stays beside it: a blob that the device refuses is dropped and the model compiled, which takes longer, no more.

Where the plugin can, a blob is without the weights: each model of an artifact would have all of them once more
(SmolLM2's decode 335 MB, without them 10). An import then takes them from the artifact.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ssmd.machine.cache import BUILD, CachedFile, cache_folder
from ssmd.runtime.hoststate.graph import GraphError
from ssmd_openvino.graph import reason

log = logging.getLogger(__name__)
_WEIGHTLESS = "ENABLE_WEIGHTLESS"  # the plugin's name for it
_TOO_FEW_REGISTERS = "not enough registers"  # of what the plugin says
# What tells drivers and devices apart between which no blob can be exchanged.
_IDENTITY = ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "NPU_DRIVER_VERSION", "NPU_COMPILER_VERSION")


def identity(core: Any, device: str) -> str:
    """Platform, driver and compiler of a device ("NPU"), as far as it tells them, and the version of OpenVINO."""
    known = set(core.get_property(device, "SUPPORTED_PROPERTIES"))
    told = [f"{name} {core.get_property(device, name)}" for name in _IDENTITY if name in known]
    return "; ".join([f"openvino {core.get_versions(device)[device].build_number}", *told])


def compile_model(core: Any, model: Any, device: str, properties: Mapping[str, Any]) -> Any:
    """Compile an openvino.Model for a device: an openvino.CompiledModel. Raises RuntimeError.

    The CPU plugin writes kernels for runs of operators. Long ones, such as an activation of 32 segments, take more
    registers than a processor without AVX-512 has, and the plugin gives up; without such kernels it does not.
    """
    try:
        return core.compile_model(model, device, properties)
    except RuntimeError as err:
        if _TOO_FEW_REGISTERS not in str(err):
            raise
        log.info("%s has too few registers for the kernels that OpenVINO would write: it goes without them", device)
        return core.compile_model(model, device, {**properties, "SNIPPETS_MODE": "DISABLE"})


def can_be_weightless(core: Any, device: str) -> bool:
    """Whether the plugin, driver and compiler of a device make blobs without weights."""
    return _WEIGHTLESS in core.get_property(device, "SUPPORTED_PROPERTIES")


class Compiler:
    """Compiles the models of one artifact for one device."""

    def __init__(
        self, core: Any, device: str, properties: Mapping[str, Any], build: str | None, *, weightless: bool = False
    ) -> None:
        """`build`: of the artifact, to keep what is compiled; None keeps nothing. `weightless`: what is kept is
        without the weights."""
        self._core, self._device, self._properties = core, device, dict(properties)
        self._weightless = weightless
        self.folder: Path | None = None  # of this artifact, device and driver
        if build is not None:
            text = "\n".join((identity(core, device), *(f"{k}={v}" for k, v in sorted(properties.items()))))
            name = hashlib.sha256(text.encode()).hexdigest()[:24] + ("-weightless" if weightless else "")
            self.folder = cache_folder() / "openvino" / build[:BUILD] / device.lower() / name

    def compiled(self, model: Path, weights: Path) -> Any:
        """The openvino.CompiledModel of an IR and its weights. Raises GraphError."""
        if self.folder is None:
            return self._compile(model, weights)
        blob = self._kept(self.folder, model)
        if blob.good():
            try:
                # Not the file as a tensor: the model would go on reading memory that nobody holds for it.
                source = {"MODEL_PTR": self._core.read_model(model, weights)} if self._weightless else {}
                return self._core.import_model(blob.path.read_bytes(), self._device, {**self._properties, **source})
            except RuntimeError as err:
                log.warning("%s refuses %s (%s): compiling the model again", self._device, blob.path, reason(err))
        blob.drop()
        self._forget_others(self.folder)
        compiled = self._compile(model, weights)
        fresh = blob.fresh()
        if fresh is not None:
            try:
                with fresh.open("wb") as f:
                    f.write(compiled.export_model().getbuffer())
                blob.keep(fresh)
            except (OSError, RuntimeError) as err:
                log.warning("the compiled %s could not be kept (%s): each load compiles it again", model.name, err)
                fresh.unlink(missing_ok=True)
        return compiled

    def anew(self, model: Path, weights: Path) -> tuple[Any, int | None]:
        """Compile it, whatever is kept, and keep that: the model, and the bytes of what is kept. Raises GraphError."""
        if self.folder is None:
            return self._compile(model, weights), None
        blob = self._kept(self.folder, model)
        blob.drop()
        compiled = self.compiled(model, weights)
        return compiled, blob.path.stat().st_size if blob.path.exists() else None

    @staticmethod
    def _kept(folder: Path, model: Path) -> CachedFile:
        return CachedFile(folder / f"{model.stem}.blob", "each load compiles the model again")

    @staticmethod
    def _forget_others(folder: Path) -> None:
        """Blobs of this artifact for drivers that are gone: nothing would ever read them again."""
        for other in folder.parent.glob("*"):
            if other.name.partition("-")[0] != folder.name.partition("-")[0]:
                shutil.rmtree(other, ignore_errors=True)

    def _compile(self, model: Path, weights: Path) -> Any:
        """Compile in a thread of its own: CPU_DENORMALS_OPTIMIZATION changes the thread that compiles, and by it the
        threads that this one starts, which compute.
        """
        try:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._compile_here, model, weights).result()
        except RuntimeError as err:
            raise GraphError(f"OpenVINO cannot load {model.name} on {self._device}: {reason(err)}") from err

    def _compile_here(self, model: Path, weights: Path) -> Any:
        properties = {**self._properties, _WEIGHTLESS: True} if self._weightless else self._properties
        return compile_model(self._core, self._core.read_model(model, weights), self._device, properties)
