"""The devices of OpenVINO: those found here, and for the others the reason and the remedy."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ssmd.machine.processor import cpu_name
from ssmd.machine.threads import default_threads
from ssmd.runtime.protocol import Device

NPU_DRIVER = "https://github.com/intel/linux-npu-driver/releases"
_UNTRIED = "; never executed on one by those who made ssmd"


def devices(core: Any, root: Path = Path("/")) -> list[Device]:
    """List the devices, and of the others why not. core: an openvino.Core. root: where the system's /dev is.

    OpenVINO is asked of a device only where Linux shows one: its plugin would take 36 MB for the answer.
    """
    listed = [Device("cpu", f"{cpu_name()}, {default_threads()} threads by default")]
    for name, kind, missing, nodes in (
        ("GPU", "Intel GPU", _no_gpu, ("dev/dri/renderD*", "dev/dxg")),
        ("NPU", "Intel NPU", _no_npu, ("dev/accel/accel*",)),
    ):
        shown = sys.platform != "linux" or any(any(root.glob(node)) for node in nodes)
        if shown and _found(core, name):
            listed.append(Device(name.lower(), f"{core.get_property(name, 'FULL_DEVICE_NAME')}{_UNTRIED}"))
        else:
            listed.append(Device(name.lower(), kind, missing(root, shown)))
    return listed


def _found(core: Any, name: str) -> bool:
    try:
        return bool(core.get_property(name, "AVAILABLE_DEVICES"))
    except RuntimeError:  # there is no such plugin, or its driver is missing
        return False


def _no_gpu(_: Path, shown: bool) -> str:
    if not shown:
        return "there is no GPU here: no /dev/dri/renderD*"
    return "OpenVINO finds no Intel GPU; if there is one, install its compute driver (intel-opencl-icd on Debian)"


def _no_npu(root: Path, shown: bool) -> str:
    """Return the part that is missing for OpenVINO to use an NPU, from the processor on."""
    if sys.platform == "win32":
        return "no Intel NPU that OpenVINO can use: it needs a Core Ultra processor and its NPU driver (Windows Update)"
    if sys.platform != "linux":
        return "Intel NPUs work under Linux and Windows only"
    nodes = sorted((root / "dev/accel").glob("accel*"))
    if not shown:
        return (
            "no Intel NPU here (there is no /dev/accel/accel*): it needs a Core Ultra processor and a kernel from 6.8 "
            "on with the module intel_vpu"
        )
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return (
            f"{nodes[0]} may not be opened: add your user to its group (sudo usermod -aG render $USER) and log in again"
        )
    return (
        f"{nodes[0]} is there, its driver is not: install intel-level-zero-npu and intel-driver-compiler-npu from "
        f"{NPU_DRIVER}"
    )
