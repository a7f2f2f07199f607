"""The compiler of models for a device. Compiled models are kept, so that the next load need not compile them.

A kept blob fits one artifact, OpenVINO, device and driver, all of which are in its name. The model itself stays
available: if the device refuses a blob, it is dropped and the model is compiled again, which only takes longer.

If the plugin can, a blob does not contain the weights: otherwise each model of an artifact has all of them (SmolLM2's
decode has 335 MB, without them 10). An import then reads them from the artifact.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ssmd.machine.cache import BUILD, CachedFile, cache_folder
from ssmd.runtime.hoststate.graph import GraphError
from ssmd_openvino.graph import reason

log = logging.getLogger(__name__)
_WEIGHTLESS = "ENABLE_WEIGHTLESS"  # the plugin's name for it
_CHOSEN = "GatherMatmul"  # begins the plugin's name of a product that reads the weights of chosen experts alone
PRODUCTS = 3  # that read chosen experts alone, of each layer with experts: gate, up and down
_TOO_FEW_REGISTERS = "not enough registers"  # of what the plugin says
# Properties that identify a driver and device; a blob works only with the same ones.
_IDENTITY = ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "NPU_DRIVER_VERSION", "NPU_COMPILER_VERSION")


def identity(core: Any, device: str) -> str:
    """Return the version of OpenVINO, and the platform, driver and compiler of a device ("NPU") if it reports them."""
    known = set(core.get_property(device, "SUPPORTED_PROPERTIES"))
    told = [f"{name} {core.get_property(device, name)}" for name in _IDENTITY if name in known]
    return "; ".join([f"openvino {core.get_versions(device)[device].build_number}", *told])


def compile_model(core: Any, model: Any, device: str, properties: Mapping[str, Any]) -> Any:
    """Compile an openvino.Model for a device. Returns an openvino.CompiledModel. Raises RuntimeError.

    The CPU plugin generates kernels for runs of operators. Long runs, such as an activation of 32 segments, need more
    registers than a processor without AVX-512 has, and the plugin fails. The model is then compiled without such
    kernels.
    """
    try:
        return _apart(core.compile_model, model, device, properties)
    except RuntimeError as err:
        if _TOO_FEW_REGISTERS not in str(err):
            raise
        log.info("%s has too few registers for the kernels that OpenVINO would write: it goes without them", device)
        return _apart(core.compile_model, model, device, {**properties, "SNIPPETS_MODE": "DISABLE"})


def _apart(make: Callable[..., Any], *args: Any) -> Any:
    """Return make(*args), called in a thread of its own.

    CPU_DENORMALS_OPTIMIZATION takes subnormal numbers for zero in the thread that makes a model, and in all threads
    started by it, which compute. The caller's thread keeps them.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make, *args).result()


def chosen_products(compiled: Any) -> int:
    """Count the products of a compiled model that read only the weights of chosen experts."""
    kinds = (op.get_rt_info()["layerType"].astype(str) for op in compiled.get_runtime_model().get_ops())
    return sum(kind.startswith(_CHOSEN) for kind in kinds)


def can_be_weightless(core: Any, device: str) -> bool:
    """Return True if the plugin, driver and compiler of a device make blobs without weights."""
    return _WEIGHTLESS in core.get_property(device, "SUPPORTED_PROPERTIES")


class Compiler:
    """Compiles the models of one artifact for one device."""

    def __init__(
        self, core: Any, device: str, properties: Mapping[str, Any], build: str | None, *, weightless: bool = False
    ) -> None:
        """build: the artifact's, to keep blobs; None keeps none. weightless: keep blobs without the weights."""
        self._core, self._device, self._properties = core, device, dict(properties)
        self._weightless = weightless
        self.folder: Path | None = None  # of this artifact, device and driver
        if build is not None:
            text = "\n".join((identity(core, device), *(f"{k}={v}" for k, v in sorted(properties.items()))))
            name = hashlib.sha256(text.encode()).hexdigest()[:24] + ("-weightless" if weightless else "")
            self.folder = cache_folder() / "openvino" / build[:BUILD] / device.lower() / name

    def compiled(self, model: Path, weights: Path) -> Any:
        """Return the openvino.CompiledModel of an IR and its weights. Raises GraphError."""
        if self.folder is None:
            return self._compile(model, weights)
        blob = self._kept(self.folder, model)
        if blob.good():
            try:
                # Not the file as a tensor: the model would go on reading memory that may be freed.
                source = {"MODEL_PTR": self._core.read_model(model, weights)} if self._weightless else {}
                properties = {**self._properties, **source}
                return _apart(self._core.import_model, blob.path.read_bytes(), self._device, properties)
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
        """Compile a model even if a blob is kept, and keep the new one. Returns (model, the blob's bytes).

        Raises GraphError.
        """
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
        """Remove this artifact's blobs for other drivers of the device, which are not read any more."""
        for other in folder.parent.glob("*"):
            if other.name.partition("-")[0] != folder.name.partition("-")[0]:
                shutil.rmtree(other, ignore_errors=True)

    def _compile(self, model: Path, weights: Path) -> Any:
        properties = {**self._properties, _WEIGHTLESS: True} if self._weightless else self._properties
        try:
            return compile_model(self._core, self._core.read_model(model, weights), self._device, properties)
        except RuntimeError as err:
            raise GraphError(f"OpenVINO cannot load {model.name} on {self._device}: {reason(err)}") from err
