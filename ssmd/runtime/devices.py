"""The devices that each runtime can use here. Each runtime is tried in a process of its own.

So a library that crashes or hangs when it is loaded harms no other process, and is reported.
As a program, it takes a runtime's name and prints the devices as JSON.
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
from ssmd.runtime.info import runtime_names
from ssmd.runtime.protocol import Device, RuntimeUnavailable, get_runtime
from ssmd.runtime.trial import CrashError, last_line

LIMIT_S = 60.0  # longest trial of a runtime: a driver may be slow to answer
_SAID = 200  # characters of output that are reported if it is not JSON
_BEHIND_OTHERS = 10  # niceness of a trial: the daemon that starts it may be generating answers


@dataclass(frozen=True)
class RuntimeStatus:
    """The result of a runtime's trial. problem: the reason why it cannot be used at all, or ""."""

    name: str
    problem: str
    devices: tuple[Device, ...]

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices that can be used."""
        return tuple(device for device in self.devices if not device.why_not)

    @property
    def why_not(self) -> str:
        """The reason why none of its devices can be used; "" if one can."""
        reasons = [device.why_not for device in self.devices] or ["it has no devices"]
        return self.problem or ("" if self.usable else reasons[0])


def find(names: Sequence[str] | None = None, *, limit_s: float = LIMIT_S) -> list[RuntimeStatus]:
    """Try all registered runtimes, or those named, all at the same time. limit_s: longest trial of each."""
    names = runtime_names() if names is None else names
    if not names:
        return []
    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda name: _tried(name, limit_s), names))


def look(name: str) -> RuntimeStatus:
    """Try a runtime in this process."""
    try:
        runtime = get_runtime(name)
        devices = tuple(runtime.devices())
        check = getattr(runtime, "check", None)  # checks libraries that a load needs and devices() does not
        if check is not None and any(not device.why_not for device in devices):
            check()
    except RuntimeUnavailable as err:
        return RuntimeStatus(name, str(err), ())
    except Exception as err:  # a package from elsewhere may raise any error
        return RuntimeStatus(name, f"it cannot list its devices ({type(err).__name__}: {err})", ())
    return RuntimeStatus(name, "", devices)


def why_not(runtime: str, devices: Sequence[Device], wanted: str) -> str:
    """Return the reason why a runtime with these devices cannot use the one that is wanted, or ""."""
    for device in devices:
        if device.name == wanted:
            return f"{wanted}: {device.why_not}" if device.why_not else ""
    there = ", ".join(device.name for device in devices)
    return f"runtime {runtime} has no device {wanted!r}; it has: {there or 'none'}"


def _tried(name: str, limit_s: float) -> RuntimeStatus:
    try:
        said = last_line(command("ssmd.runtime.devices", name), limit_s)
    except CrashError as err:
        return RuntimeStatus(name, f"its library was tried in a process of its own, and {err}", ())
    return _parsed(name, said) or RuntimeStatus(name, f"it printed {said[:_SAID]!r} instead of a result", ())


def _parsed(name: str, said: str) -> RuntimeStatus | None:
    try:
        fields: Any = json.loads(said)
        devices = tuple(Device(**{key: str(value) for key, value in one.items()}) for one in fields["devices"])
        return RuntimeStatus(name, str(fields["problem"]), devices)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def main() -> None:
    """Print the result as JSON. A library's output to stdout goes to stderr.

    Ends at once, before a library can write or crash again.
    """
    answer = os.dup(1)
    os.dup2(2, 1)
    behind_others(_BEHIND_OTHERS)
    found = look(sys.argv[1])
    os.write(answer, (json.dumps(asdict(found)) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()
