"""Adapters, a device opened on one of them, its buffers and its compiled kernels."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray

from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.protocol import Device, RuntimeUnavailable
from ssmd_wgpu import library
from ssmd_wgpu.recorder import Recorder, Region, dispatch

BACKENDS = {"Vulkan": "vulkan", "Metal": "metal", "D3D12": "dx12", "OpenGL": "gl"}  # the best one first
KINDS = {"DiscreteGPU": "discrete GPU", "IntegratedGPU": "integrated GPU", "CPU": "software on the processor"}
SUBGROUP = "subgroup"  # a feature
COHERENT = "memory-decoration-coherent"  # one: what a workgroup wrote, another of the same dispatch can read
BEST = "gpu"  # the device that stands for the best adapter
LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroups-per-dimension",
)
ALIGNMENT = 256  # bytes, of a binding in its buffer: what every adapter takes
_NEEDED = {
    "max-storage-buffers-per-shader-stage": 8,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
}
_INTEL = 0x8086  # whose compiler may choose another size, 8 at least, for each kernel
_SIZES = """
@group(0) @binding(0) var<storage, read_write> Y: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) li: u32, @builtin(subgroup_size) size: u32) {
  Y[li] = size;
}"""
_BINDING = re.compile(r"@group\((\d)\)\s*@binding\((\d)\)\s*var<storage,\s*(read|read_write)>\s*(\w+)\s*:")
SHADERS = Path(__file__).parent / "shaders"
_TEMPLATES = Environment(
    loader=FileSystemLoader(SHADERS),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,  # of an included file
    autoescape=False,  # noqa: S701 - it is WGSL
)


@dataclass(frozen=True)
class GpuAdapter:
    """An adapter of the system. name: its name for --device."""

    name: str
    backend: str
    kind: str
    adapter: Any

    @property
    def software(self) -> bool:
        return self.kind == KINDS["CPU"]

    @property
    def description(self) -> str:
        info = self.adapter.info
        return f"{info['device']}, {self.kind}, {info['description'] or 'driver unknown'}, {self.backend}"

    @cached_property
    def why_not(self) -> str:
        """Say which of the adapter's limits is too low, or why no device can be opened on it, or ""."""
        for name, least in _NEEDED.items():
            if self.adapter.limits[name] < least:
                return f"its {name} is {self.adapter.limits[name]}, {least} are needed"
        try:
            self.__dict__["spare"] = self._opened()
        except RuntimeUnavailable as err:
            return f"it cannot be opened: {err}"
        return ""

    def device(self) -> Any:
        """Open a device with all of the adapter's limits, or return the one that `why_not` opened. Raises
        RuntimeUnavailable.
        """
        return self.__dict__.pop("spare", None) or self._opened()

    def _opened(self) -> Any:
        """Open a device. OpenGL without compute shaders says only then that it has none."""
        limits = {name: self.adapter.limits[name] for name in LIMITS}
        features = [name for name in (SUBGROUP, COHERENT) if name in self.adapter.features]
        try:
            return self.adapter.request_device_sync(required_features=features, required_limits=limits)
        except Exception as err:  # wgpu raises RuntimeError, and errors of its own
            raise RuntimeUnavailable(str(err).strip()) from err


def adapters() -> list[GpuAdapter]:
    """List the adapters here, best first: real GPUs before software, the system's own interface before OpenGL."""
    listed = []
    for adapter in library.wgpu().gpu.enumerate_adapters_sync():
        info = adapter.info
        if info["backend_type"] in BACKENDS:
            kind = KINDS.get(info["adapter_type"], "GPU")
            listed.append((BACKENDS[info["backend_type"]], kind, adapter))
    kinds, backends = [KINDS["DiscreteGPU"], KINDS["IntegratedGPU"], "GPU", KINDS["CPU"]], list(BACKENDS.values())
    listed.sort(key=lambda found: (kinds.index(found[1]), backends.index(found[0])))
    named: dict[str, int] = {}
    made = []
    for backend, kind, adapter in listed:
        number = named[backend] = named.get(backend, 0) + 1
        made.append(GpuAdapter(backend if number == 1 else f"{backend}.{number}", backend, kind, adapter))
    return made


def devices() -> list[Device]:
    """List the best adapter as "gpu", and each by its own name."""
    found = adapters()
    if not found:
        return [Device(BEST, "any GPU", no_adapter(sys.platform))]
    best = next((f for f in found if not f.why_not), found[0])
    return [Device(name, f.description, f.why_not) for name, f in ((BEST, best), *((f.name, f) for f in found))]


def no_adapter(platform: str) -> str:
    """Return a message with what to install if no adapter is found."""
    if platform == "darwin":
        return "wgpu finds no Metal device: it needs macOS 11 or later"
    if platform == "win32":
        return "wgpu finds no GPU: install the driver of your graphics card (DirectX 12 or Vulkan)"
    return (
        "wgpu finds no GPU driver; install one: on Debian and Ubuntu apt install mesa-vulkan-drivers libvulkan1 (AMD, "
        "Intel, and software), on Fedora mesa-vulkan-drivers; for NVIDIA its own driver"
    )


def choose_adapter(name: str | None) -> GpuAdapter:
    """Choose the adapter of that name, or the best one. Raises RuntimeUnavailable, which lists the adapters."""
    found = adapters()
    if not found:
        raise RuntimeUnavailable(no_adapter(sys.platform))
    wanted = [f for f in found if name in (None, BEST) or f.name == name]
    if not wanted:
        raise RuntimeUnavailable(
            f"runtime wgpu has no device {name!r} here; it has: {', '.join([BEST, *(f.name for f in found)])}"
        )
    usable = next((f for f in wanted if not f.why_not), None)
    if usable is None:
        raise RuntimeUnavailable(
            f"device {wanted[0].name} ({wanted[0].description}) cannot be used: {wanted[0].why_not}"
        )
    return usable


def shader(file: str, **values: Any) -> str:
    """Return the text of shaders/`file`.wgsl for these sizes."""
    return _TEMPLATES.get_template(f"{file}.wgsl").render(**values)


def digest(shaders: Path) -> str:
    """Hash the texts of a folder of shaders: other texts may sum in another order."""
    whole = hashlib.sha256()
    for file in sorted(shaders.glob("*.wgsl")):
        whole.update(file.read_bytes())
    return whole.hexdigest()


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled shader. `bindings`: of each group, name -> number."""

    pipeline: Any
    layouts: tuple[Any, ...]
    bindings: tuple[dict[str, int], ...]


class Gpu:
    """An opened device. Everything raises GraphError with wgpu's own words where it refuses."""

    def __init__(self, found: GpuAdapter) -> None:
        self.found = found
        self.limits = {name: found.adapter.limits[name] for name in LIMITS}
        try:
            self.device = found.device()
        except RuntimeUnavailable as err:
            raise RuntimeUnavailable(f"device {found.name} ({found.description}) cannot be opened: {err}") from err
        self.queue = self.device.queue
        self._kernels: dict[str, Kernel] = {}
        self._layouts: dict[tuple[tuple[int, bool], ...], Any] = {}

    @cached_property
    def subgroup(self) -> int:
        """The least number of threads that can read one another's values; 0 if none can.

        It is measured, as wgpu-native 0.32 does not report it.
        """
        if SUBGROUP not in self.found.adapter.features:
            return 0
        kernel, sizes = self.kernel(_SIZES), self.region(4 * 64)
        group = self.bound(kernel, 0, {"Y": sizes})
        [found] = self.recorder.read([dispatch(kernel.pipeline, group, None, 1, 1)], [sizes])
        least = int(found.view(np.uint32).min())
        return min(least, 8) if self.found.adapter.info["vendor_id"] == _INTEL else least

    @property
    def coherent(self) -> bool:
        """True if workgroups of one dispatch can read values that others wrote.

        On Metal this needs a fence of the whole device, which wgpu does not emit.
        """
        return COHERENT in self.found.adapter.features and self.found.backend != BACKENDS["Metal"]

    @property
    def binding_bytes(self) -> int:
        """The most bytes of a buffer that a shader can be given at once."""
        most: int = min(self.limits["max-storage-buffer-binding-size"], self.limits["max-buffer-size"])
        return most // 16 * 16

    def buffer(self, nbytes: int) -> Any:
        """Return a buffer of zeros. Raises GraphError if there is no memory for it."""
        flags = library.wgpu().BufferUsage
        usage = flags.STORAGE | flags.COPY_SRC | flags.COPY_DST
        size = max(16, -(-nbytes // 16) * 16)
        if size > self.limits["max-buffer-size"]:
            raise GraphError(f"a buffer of {size / 1e6:.0f} MB is beyond the max-buffer-size of {self.found.name}")
        try:
            return self.device.create_buffer(size=size, usage=usage)
        except Exception as err:
            raise GraphError(f"no memory for {nbytes / 1e6:.1f} MB on {self.found.name}: {err}") from err

    def region(self, nbytes: int) -> Region:
        buffer = self.buffer(nbytes)
        return Region(buffer, 0, buffer.size)

    def uploaded(self, array: NDArray[Any]) -> Region:
        """Make a buffer that holds the array."""
        region = self.region(array.nbytes)
        raw = array.reshape(-1).view(np.uint8)
        self.write(region, np.pad(raw, (0, -raw.nbytes % 4)))
        return region

    def write(self, region: Region, data: NDArray[Any], offset: int = 0) -> None:
        if offset + data.nbytes > region.size:
            raise GraphError(f"{data.nbytes} bytes at {offset} are beyond the {region.size} of a buffer")
        if data.nbytes:
            try:
                self.queue.write_buffer(region.buffer, region.offset + offset, np.ascontiguousarray(data))
            except Exception as err:
                raise GraphError(f"nothing can be written to {self.found.name}: {err}") from err

    def answers(self) -> bool:
        """Return True if the device still works."""
        try:
            self.recorder.probe()
        except GraphError:
            return False
        return True

    def wait(self) -> None:
        """Wait until all that was submitted is done."""
        self.recorder.submit([])
        self.recorder.poll()

    def kernel(self, text: str) -> Kernel:
        """Compile a shader, once for each text."""
        if text not in self._kernels:
            self._kernels[text] = self._compiled(text)
        return self._kernels[text]

    def _compiled(self, text: str) -> Kernel:
        found = [(int(m[1]), int(m[2]), m[3] == "read", m[4]) for m in _BINDING.finditer(text)]
        groups = [[b for b in found if b[0] == g] for g in range(max(b[0] for b in found) + 1)]
        layouts = tuple(self._layout(tuple((number, read) for _, number, read, _ in group)) for group in groups)
        try:
            module = self.device.create_shader_module(code=text)
            pipeline = self.device.create_compute_pipeline(
                layout=self.device.create_pipeline_layout(bind_group_layouts=list(layouts)),
                compute={"module": module, "entry_point": "main"},
            )
        except Exception as err:
            raise GraphError(f"{self.found.name} refuses a shader: {err}") from err
        return Kernel(pipeline, layouts, tuple({b[3]: b[1] for b in group} for group in groups))

    def _layout(self, bindings: tuple[tuple[int, bool], ...]) -> Any:
        if bindings not in self._layouts:
            self._layouts[bindings] = self.device.create_bind_group_layout(
                entries=[
                    {
                        "binding": number,
                        "visibility": library.wgpu().ShaderStage.COMPUTE,
                        "buffer": {"type": "read-only-storage" if read else "storage"},
                    }
                    for number, read in bindings
                ]
            )
        return self._layouts[bindings]

    def bound(self, kernel: Kernel, group: int, regions: Mapping[str, Region]) -> Any:
        """Return a bind group of the kernel from the regions that it names."""
        entries = []
        for name, number in kernel.bindings[group].items():
            region = regions[name]
            if region.size > self.binding_bytes:
                raise GraphError(f"{name} has {region.size} bytes, a binding of {self.found.name} {self.binding_bytes}")
            resource = {"buffer": region.buffer, "offset": region.offset, "size": region.size}
            entries.append({"binding": number, "resource": resource})
        return self.device.create_bind_group(layout=kernel.layouts[group], entries=entries)

    @cached_property
    def recorder(self) -> Recorder:
        return Recorder(self.device, self.queue, early=not self.found.software)
