"""An NPU played by OpenVINO's CPU plugin: everything of the way to one but the device and its driver.

As a program, what the runtime runs to try an artifact: python npu_on_cpu.py WAY ARTIFACT DEVICE
"""

from __future__ import annotations

import sys
from typing import Any

from ssmd.runtime.protocol import Device
from ssmd_openvino import runtime, trial

COMMAND = (sys.executable, __file__)


def played(core: Any) -> list[Device]:
    return [Device("cpu", "the processor"), Device("npu", "an NPU played by the processor")]


def play(patch: Any) -> None:
    """patch: has pytest's setattr and setitem."""
    patch.setitem(runtime.PLUGINS, "npu", "CPU")
    patch.setattr(runtime, "ELSEWHERE", {**runtime.ON_CPU, "INFERENCE_NUM_THREADS": 1})
    patch.setattr(runtime, "devices", played)
    patch.setattr(runtime, "TRIAL", COMMAND)


class _Patch:
    """For good, in a process of its own."""

    @staticmethod
    def setitem(of: dict[str, str], key: str, value: str) -> None:
        of[key] = value

    setattr = staticmethod(setattr)


if __name__ == "__main__":
    play(_Patch)
    trial.main()
