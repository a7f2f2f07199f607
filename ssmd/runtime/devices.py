"""What each runtime can use here. Each is tried in a process of its own: a library that crashes when it is loaded, or
hangs, is told of, and takes nothing along.

As a program: the runtime named first; what was found is printed as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ssmd.machine.child import command
from ssmd.machine.processor import behind_others
from ssmd.runtime.protocol import Device, RuntimeUnavailable, get_runtime, runtime_names
from ssmd.runtime.trial import CrashError, last_line

LIMIT_S = 60.0  # a driver may be slow to answer
_SAID = 200  # characters that are told of what is no JSON
_BEHIND_OTHERS = 10  # on the scale of nice: a daemon that is asked may be answering


@dataclass(frozen=True)
class Found:
    """What was found out about a runtime. `problem` is why nothing of it can be used, or ""."""

    name: str
    problem: str
    devices: tuple[Device, ...]

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices that can be used."""
        return tuple(device for device in self.devices if not device.why_not)

    @property
    def why_not(self) -> str:
        """Why nothing of it can be used, or "" where something can."""
        reasons = [device.why_not for device in self.devices] or ["it has no devices"]
        return self.problem or ("" if self.usable else reasons[0])


def find(names: Sequence[str] | None = None, *, limit_s: float = LIMIT_S) -> list[Found]:
    """Look at all runtimes that are registered here, or those named; at all of them at the same time.

    `limit_s`: after which one that does not answer is given up.
    """
    names = runtime_names() if names is None else names
    if not names:
        return []
    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda name: _tried(name, limit_s), names))


def look(name: str) -> Found:
    """Look at a runtime in this process."""
    try:
        runtime = get_runtime(name)
        devices = tuple(runtime.devices())
        check = getattr(runtime, "check", None)  # of what devices() does not need, and a load does
        if check is not None and any(not device.why_not for device in devices):
            check()
    except RuntimeUnavailable as err:
        return Found(name, str(err), ())
    except Exception as err:  # whatever a package from elsewhere does
        return Found(name, f"it cannot say which devices it has ({type(err).__name__}: {err})", ())
    return Found(name, "", devices)


def why_not(runtime: str, devices: Sequence[Device], wanted: str) -> str:
    """Why a runtime with these devices cannot use the one that is wanted, or ""."""
    for device in devices:
        if device.name == wanted:
            return f"{wanted}: {device.why_not}" if device.why_not else ""
    there = ", ".join(device.name for device in devices)
    return f"runtime {runtime} has no device {wanted!r}; it has: {there or 'none'}"


def _tried(name: str, limit_s: float) -> Found:
    try:
        said = last_line(command("ssmd.runtime.devices", name), limit_s)
    except CrashError as err:
        return Found(name, f"its library was tried in a process of its own, and {err}", ())
    return _parsed(name, said) or Found(name, f"it said {said[:_SAID]!r}", ())


def _parsed(name: str, said: str) -> Found | None:
    try:
        fields: Any = json.loads(said)
        devices = tuple(Device(**{key: str(value) for key, value in one.items()}) for one in fields["devices"])
        return Found(name, str(fields["problem"]), devices)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def main() -> None:
    """Print what was found, whatever a library writes to stdout, and end before it can write or crash once more."""
    answer = os.dup(1)
    os.dup2(2, 1)
    behind_others(_BEHIND_OTHERS)
    found = look(sys.argv[1])
    os.write(answer, (json.dumps(asdict(found)) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()
