"""Adapters, a device opened on one of them, its buffers and its compiled kernels."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray

from ssmd.flat.graph import GraphError
from ssmd.runtime import Device, RuntimeUnavailable
from ssmd_wgpu import library

BACKENDS = {"Vulkan": "vulkan", "Metal": "metal", "D3D12": "dx12", "OpenGL": "gl"}  # the best one first
KINDS = {"DiscreteGPU": "discrete GPU", "IntegratedGPU": "integrated GPU", "CPU": "software on the processor"}
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
_POLLS = 1000  # one is enough, as it waits
_BINDING = re.compile(r"@group\((\d)\)\s*@binding\((\d)\)\s*var<storage,\s*(read|read_write)>\s*(\w+)\s*:")
_SHADERS = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "shaders"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # noqa: S701  # it is WGSL
)


@dataclass(frozen=True)
class Found:
    """An adapter. `name` is what --device takes."""

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

    @property
    def why_not(self) -> str:
        """ "" or which of the limits is too low."""
        for name, least in _NEEDED.items():
            if self.adapter.limits[name] < least:
                return f"its {name} is {self.adapter.limits[name]}, {least} are needed"
        return ""


def adapters() -> list[Found]:
    """Those that are here, the best one first: real GPUs before software, the system's own interface before OpenGL."""
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
        made.append(Found(backend if number == 1 else f"{backend}.{number}", backend, kind, adapter))
    return made


def devices() -> list[Device]:
    """The best adapter as "gpu", and each by its own name."""
    found = adapters()
    if not found:
        return [Device(BEST, "any GPU", no_adapter(sys.platform))]
    best = next((f for f in found if not f.why_not), found[0])
    return [Device(name, f.description, f.why_not) for name, f in ((BEST, best), *((f.name, f) for f in found))]


def no_adapter(platform: str) -> str:
    """What to install."""
    if platform == "darwin":
        return "wgpu finds no Metal device: it needs macOS 11 or later"
    if platform == "win32":
        return "wgpu finds no GPU: install the driver of your graphics card (DirectX 12 or Vulkan)"
    return (
        "wgpu finds no GPU driver; install one: on Debian and Ubuntu apt install mesa-vulkan-drivers libvulkan1 (AMD, "
        "Intel, and software), on Fedora mesa-vulkan-drivers; for NVIDIA its own driver"
    )


def choose(name: str | None) -> Found:
    """Raises RuntimeUnavailable with what there is."""
    found = adapters()
    if not found:
        raise RuntimeUnavailable(no_adapter(sys.platform))
    wanted = [f for f in found if name in (None, BEST) or f.name == name]
    if not wanted:
        raise RuntimeUnavailable(
            f"runtime wgpu has no device {name!r} here; it has: {', '.join([BEST, *(f.name for f in found)])}"
        )
    usable = [f for f in wanted if not f.why_not]
    if not usable:
        raise RuntimeUnavailable(
            f"device {wanted[0].name} ({wanted[0].description}) cannot be used: {wanted[0].why_not}"
        )
    return usable[0]


def shader(file: str, **values: Any) -> str:
    """The text of shaders/`file`.wgsl for these sizes."""
    return _SHADERS.get_template(f"{file}.wgsl").render(**values)


@dataclass(frozen=True)
class Region:
    """A part of a buffer, in bytes."""

    buffer: Any
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled shader. `bindings`: of each group, name -> number."""

    pipeline: Any
    layouts: tuple[Any, ...]
    bindings: tuple[dict[str, int], ...]


class Gpu:
    """An opened device. Everything raises GraphError with wgpu's own words where it refuses."""

    def __init__(self, found: Found) -> None:
        self.found = found
        limits = found.adapter.limits
        self.limits = {name: limits[name] for name in LIMITS}
        try:
            self.device = found.adapter.request_device_sync(required_features=[], required_limits=self.limits)
        except Exception as err:  # wgpu raises RuntimeError, and errors of its own
            raise RuntimeUnavailable(f"device {found.name} ({found.description}) cannot be opened: {err}") from err
        self.queue = self.device.queue
        self._kernels: dict[str, Kernel] = {}
        self._layouts: dict[tuple[tuple[int, bool], ...], Any] = {}

    @property
    def binding_bytes(self) -> int:
        """The most that a shader can be given at once."""
        most: int = min(self.limits["max-storage-buffer-binding-size"], self.limits["max-buffer-size"])
        return most // 16 * 16

    def buffer(self, nbytes: int, *, readable: bool = False, mapped: bool = False) -> Any:
        """A buffer of zeros; `readable`: by the host, not by shaders. Raises GraphError if there is no memory."""
        flags = library.wgpu().BufferUsage
        usage = flags.MAP_READ | flags.COPY_DST if readable else flags.STORAGE | flags.COPY_SRC | flags.COPY_DST
        size = max(16, -(-nbytes // 16) * 16)
        try:
            return self.device.create_buffer(size=size, usage=usage, mapped_at_creation=mapped)
        except Exception as err:
            raise GraphError(f"no memory for {nbytes / 1e6:.1f} MB on {self.found.name}: {err}") from err

    def region(self, nbytes: int) -> Region:
        buffer = self.buffer(nbytes)
        return Region(buffer, 0, buffer.size)

    def uploaded(self, array: NDArray[Any]) -> Region:
        """A buffer that holds the array, which is read once: from a mapped file into the device's memory."""
        buffer = self.buffer(array.nbytes, mapped=True)
        raw = array.reshape(-1).view(np.uint8)
        whole = raw.nbytes // 4 * 4
        if whole:
            buffer.write_mapped(raw[:whole].data)
        if whole != raw.nbytes:
            buffer.write_mapped(raw[whole:].tobytes().ljust(4, b"\0"), whole)
        buffer.unmap()
        return Region(buffer, 0, buffer.size)

    def write(self, region: Region, data: NDArray[Any], offset: int = 0) -> None:
        if offset + data.nbytes > region.size:
            raise GraphError(f"{data.nbytes} bytes at {offset} are beyond the {region.size} of a buffer")
        if data.nbytes:
            self.queue.write_buffer(region.buffer, region.offset + offset, np.ascontiguousarray(data))

    def kernel(self, text: str) -> Kernel:
        """Compiled once for each text."""
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
        """A bind group of the kernel from the regions that it names."""
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
        return Recorder(self)


@dataclass(frozen=True)
class Copy:
    """Bytes from one buffer to another."""

    source: Any
    source_offset: int
    target: Any
    target_offset: int
    size: int


Dispatch = tuple[Any, Any, Any, int, int, int]  # pipeline, bind group 0, bind group 1 or None, workgroups x, y, z


class Recorder:
    """Records dispatches through C functions, all into one compute pass, submits them, and reads back."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        lib, ffi, _ = library.native()
        self._lib, self._ffi = lib, ffi
        self._device, self._queue = gpu.device._internal, gpu.queue._internal
        self._encoder_descriptor = ffi.new("WGPUCommandEncoderDescriptor *")
        self._pass_descriptor = ffi.new("WGPUComputePassDescriptor *")
        self._buffer_descriptor = ffi.new("WGPUCommandBufferDescriptor *")
        self._commands = ffi.new("WGPUCommandBuffer[1]")
        self._staging: Any = None

    def submit(
        self, dispatches: Sequence[Dispatch], copies: Sequence[Copy] = (), clears: Sequence[Region] = ()
    ) -> None:
        """Clears, then dispatches, then copies, in order. Raises GraphError if the device refuses."""
        lib, null = self._lib, self._ffi.NULL
        with library.raising("submit"):
            encoder = lib.wgpuDeviceCreateCommandEncoder(self._device, self._encoder_descriptor)
            for region in clears:
                lib.wgpuCommandEncoderClearBuffer(encoder, region.buffer._internal, region.offset, region.size)
            if dispatches:
                recorded = lib.wgpuCommandEncoderBeginComputePass(encoder, self._pass_descriptor)
                set_pipeline, set_group = lib.wgpuComputePassEncoderSetPipeline, lib.wgpuComputePassEncoderSetBindGroup
                dispatch, last = lib.wgpuComputePassEncoderDispatchWorkgroups, None
                for pipeline, group0, group1, x, y, z in dispatches:
                    if pipeline is not last:
                        set_pipeline(recorded, pipeline)
                        last = pipeline
                    set_group(recorded, 0, group0, 0, null)
                    if group1 is not None:
                        set_group(recorded, 1, group1, 0, null)
                    dispatch(recorded, x, y, z)
                lib.wgpuComputePassEncoderEnd(recorded)
                lib.wgpuComputePassEncoderRelease(recorded)
            for c in copies:
                lib.wgpuCommandEncoderCopyBufferToBuffer(
                    encoder, c.source._internal, c.source_offset, c.target._internal, c.target_offset, c.size
                )
            self._commands[0] = lib.wgpuCommandEncoderFinish(encoder, self._buffer_descriptor)
            lib.wgpuCommandEncoderRelease(encoder)
            lib.wgpuQueueSubmit(self._queue, 1, self._commands)
            lib.wgpuCommandBufferRelease(self._commands[0])

    def read(self, dispatches: Sequence[Dispatch], regions: Sequence[Region]) -> list[NDArray[np.uint8]]:
        """Submit, wait, and return fresh copies of these regions."""
        total = sum(region.size for region in regions)
        if self._staging is None or self._staging.size < total:
            self._staging = self._gpu.buffer(total, readable=True)
        copies, at = [], 0
        for region in regions:
            copies.append(Copy(region.buffer, region.offset, self._staging, at, region.size))
            at += region.size
        self.submit(dispatches, copies)
        return self._mapped(total, [region.size for region in regions])

    def _mapped(self, total: int, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        lib, ffi = self._lib, self._ffi
        status: list[int] = []

        @ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
        def done(code: int, *_: Any) -> None:
            status.append(int(code))

        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode, info.callback = lib.WGPUCallbackMode_AllowProcessEvents, done
        with library.raising("read back"):
            lib.wgpuBufferMapAsync(self._staging._internal, lib.WGPUMapMode_Read, 0, total, info[0])
            for _ in range(_POLLS):
                lib.wgpuDevicePoll(self._device, True, ffi.NULL)  # waits for what was submitted
                if status:
                    break
            else:
                raise GraphError("the device does not answer: it is lost")
        if status[0] != lib.WGPUMapAsyncStatus_Success:
            raise GraphError(f"the device gave nothing back (status {status[0]}): it is lost")
        pointer = lib.wgpuBufferGetConstMappedRange(self._staging._internal, 0, total)
        whole = np.frombuffer(ffi.buffer(pointer, total), np.uint8)
        parts, at = [], 0
        for size in sizes:
            parts.append(whole[at : at + size].copy())
            at += size
        del whole
        lib.wgpuBufferUnmap(self._staging._internal)
        return parts
