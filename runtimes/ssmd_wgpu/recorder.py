"""Records dispatches through C functions, all into one compute pass, submits them, and reads back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu import library

_FIRST = 8  # dispatches of the first submission of a step: while it is computed, the next ones are recorded
_STAGING_BYTES = 64 << 20  # kept for the next read: the states of large models, and rows of some thousand tokens
_POLLS = 1000  # one is enough, as it waits


@dataclass(frozen=True)
class Region:
    """A part of a buffer, in bytes."""

    buffer: Any
    offset: int
    size: int


@dataclass(frozen=True)
class Copy:
    """A copy of bytes from one buffer to another."""

    source: Any
    source_offset: int
    target: Any
    target_offset: int
    size: int


# Pipeline, bind group 0, bind group 1 or None, as C has them; workgroups x, y; and the same three as wgpu-py has them.
Dispatch = tuple[Any, Any, Any, int, int, tuple[Any, Any, Any]]


def dispatch(pipeline: Any, group0: Any, group1: Any, x: int, y: int) -> Dispatch:
    second = None if group1 is None else group1._internal
    return pipeline._internal, group0._internal, second, x, y, (pipeline, group0, group1)


class Recorder:
    """A recorder that submits the dispatches of one device.

    With SSMD_WGPU_WRAPPED=1 it records with wgpu-py, which reports errors at the call that caused them, but takes eight
    times as long.
    """

    def __init__(self, device: Any, queue: Any, *, early: bool = False) -> None:
        """early: submit dispatches before a read in parts, so that the device computes while the rest is recorded."""
        self._wrapped, self._queue_wrapped, self.early = device, queue, early
        self._debugging = os.environ.get("SSMD_WGPU_WRAPPED", "") not in ("", "0")
        lib, ffi, _ = library.native()
        self._lib, self._ffi = lib, ffi
        self._device, self._queue = device._internal, queue._internal
        self._encoder_descriptor = ffi.new("WGPUCommandEncoderDescriptor *")
        self._pass_descriptor = ffi.new("WGPUComputePassDescriptor *")
        self._buffer_descriptor = ffi.new("WGPUCommandBufferDescriptor *")
        self._commands = ffi.new("WGPUCommandBuffer[1]")
        self._staging: Any = None
        self._scratch = device.create_buffer(size=16, usage=library.wgpu().BufferUsage.COPY_DST)

    def probe(self) -> None:
        """Check that the device is there: a submission to a lost one would end the process. Raises GraphError."""
        try:
            self._queue_wrapped.write_buffer(self._scratch, 0, bytes(16))
        except Exception as err:
            raise GraphError(f"the device is lost: {err}") from err

    def submit(
        self,
        dispatches: Sequence[Dispatch],
        copies: Sequence[Copy] = (),
        clears: Sequence[Region] = (),
        *,
        probed: bool = False,
    ) -> None:
        """Submit clears, then dispatches, then copies, in order. Raises GraphError if the device refuses or is lost.

        probed: a write to the device just before has shown that it works.
        """
        if not probed:
            self.probe()
        if self._debugging:
            self._submit_wrapped(dispatches, copies, clears)
            return
        lib, null = self._lib, self._ffi.NULL
        with library.raising("submit"):
            encoder = lib.wgpuDeviceCreateCommandEncoder(self._device, self._encoder_descriptor)
            for region in clears:
                lib.wgpuCommandEncoderClearBuffer(encoder, region.buffer._internal, region.offset, region.size)
            if dispatches:
                recorded = lib.wgpuCommandEncoderBeginComputePass(encoder, self._pass_descriptor)
                set_pipeline, set_group = lib.wgpuComputePassEncoderSetPipeline, lib.wgpuComputePassEncoderSetBindGroup
                run, last = lib.wgpuComputePassEncoderDispatchWorkgroups, None
                for pipeline, group0, group1, x, y, _ in dispatches:
                    if pipeline is not last:
                        set_pipeline(recorded, pipeline)
                        last = pipeline
                    set_group(recorded, 0, group0, 0, null)
                    if group1 is not None:
                        set_group(recorded, 1, group1, 0, null)
                    run(recorded, x, y, 1)
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

    def _submit_wrapped(self, dispatches: Sequence[Dispatch], copies: Sequence[Copy], clears: Sequence[Region]) -> None:
        encoder = self._wrapped.create_command_encoder()
        for region in clears:
            encoder.clear_buffer(region.buffer, region.offset, region.size)
        if dispatches:
            recorded = encoder.begin_compute_pass()
            for *_, x, y, (pipeline, group0, group1) in dispatches:
                recorded.set_pipeline(pipeline)
                recorded.set_bind_group(0, group0)
                if group1 is not None:
                    recorded.set_bind_group(1, group1)
                recorded.dispatch_workgroups(x, y, 1)
            recorded.end()
        for c in copies:
            encoder.copy_buffer_to_buffer(c.source, c.source_offset, c.target, c.target_offset, c.size)
        self._queue_wrapped.submit([encoder.finish()])

    def poll(self) -> None:
        """Wait for the device, and have it answer."""
        self._lib.wgpuDevicePoll(self._device, True, self._ffi.NULL)

    def read(
        self, dispatches: Sequence[Dispatch], regions: Sequence[Region], *, probed: bool = False
    ) -> list[NDArray[np.uint8]]:
        """Submit, wait, and return fresh copies of these regions."""
        return self.gathered([[region] for region in regions], dispatches, probed=probed)

    def gathered(
        self, groups: Sequence[Sequence[Region]], dispatches: Sequence[Dispatch] = (), *, probed: bool = False
    ) -> list[NDArray[np.uint8]]:
        """Submit, wait, and return a fresh array of each group's regions, one after another."""
        copies, sizes, at = [], [sum(region.size for region in group) for group in groups], 0
        total = sum(sizes)
        if not total:
            self.submit(dispatches, probed=probed)
            return [np.empty(0, np.uint8) for _ in groups]
        if self._staging is None or self._staging.size < total:
            self._staging = self._make_staging(total)
        for region in (region for group in groups for region in group):
            copies.append(Copy(region.buffer, region.offset, self._staging, at, region.size))
            at += region.size
        *parts_before, last = growing(dispatches) if self.early else [dispatches]
        for part in parts_before:
            self.submit(part, probed=probed)
            probed = True
        self.submit(last, copies, probed=probed)
        parts = self._mapped(total, sizes)
        if self._staging.size > _STAGING_BYTES:
            self._staging = None
        return parts

    def _mapped(self, total: int, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        lib, ffi = self._lib, self._ffi
        status: list[int] = []

        @ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator] # cffi is untyped
        def done(code: int, *_: Any) -> None:
            status.append(int(code))

        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode, info.callback = lib.WGPUCallbackMode_AllowProcessEvents, done
        with library.raising("read back"):
            lib.wgpuBufferMapAsync(self._staging._internal, lib.WGPUMapMode_Read, 0, total, info[0])
            for _ in range(_POLLS):
                self.poll()
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

    def _make_staging(self, nbytes: int) -> Any:
        flags = library.wgpu().BufferUsage
        try:
            return self._wrapped.create_buffer(size=-(-nbytes // 16) * 16, usage=flags.MAP_READ | flags.COPY_DST)
        except Exception as err:
            raise GraphError(f"no memory to read {nbytes / 1e6:.1f} MB back: {err}") from err


def growing(dispatches: Sequence[Dispatch]) -> list[Sequence[Dispatch]]:
    """Cut dispatches into submissions: a small one, then each twice as large as the one before it.

    A device takes some three times as long for a dispatch as it takes to record it: it never waits for the next part.
    """
    parts, at, size = list[Sequence[Dispatch]](), 0, _FIRST
    while len(dispatches) - at > 2 * size:
        parts.append(dispatches[at : at + size])
        at, size = at + size, 2 * size
    return [*parts, dispatches[at:]]
