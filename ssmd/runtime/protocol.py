"""The one interface behind which every runtime stands, and how runtimes are found.

A runtime is a class named by an entry point of the group "ssmd.runtimes". `tests/contract` is the definition of
"works"; its rules are listed in docs/runtime-contract.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.installation import DISTRIBUTION, to_add
from ssmd.machine.processor import MOST_THREADS
from ssmd.model.state import Part, State, StateSpec

if TYPE_CHECKING:
    from ssmd.model.artifact import Artifact

Logits = NDArray[np.float32]
Handle = Any  # device-resident and opaque: only the program that made it can read it


class ProgramError(ValueError):
    """A call that a program refuses before anything ran; the handle is unharmed."""


class StateLost(RuntimeError):
    """The device went away, or a step failed half way, and with it the state of handles, which are of no use but to be
    released.

    The program works again, or tries to at its next call.
    """


class RuntimeUnavailable(RuntimeError):
    """No runtime of that name, or it cannot run here; the message says what to install or change."""


@dataclass(frozen=True)
class Device:
    """A device of a runtime. `why_not` is empty when it is usable here, else the reason and what would help."""

    name: str
    description: str
    why_not: str = ""


class Program(Protocol):
    """A loaded artifact on a device: prefill buckets plus decode. Calls are serialised by the implementation."""

    spec: StateSpec
    buckets: tuple[int, ...]
    context: int | None
    vocabulary: int
    producer: str  # runtime, its version, device: with the build, what an exact resume needs; and threads
    threads: int  # of the processor that compute a step

    def new_state(self) -> Handle:
        """A handle at position 0."""

    def prefill(self, handle: Handle, tokens: Sequence[int]) -> Logits:
        """Feed 1 <= len(tokens) <= max(buckets) tokens; float32 [vocab] logits of the last one, a fresh array."""

    def decode(self, handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        """Feed one token to each of n handles; float32 [n, vocab], a fresh array."""

    def position(self, handle: Handle) -> int:
        """Tokens fed so far."""

    def save(self, handle: Handle, since: int = 0) -> State:
        """Canonical copy with KV rows from `since` on; does not disturb the handle, nor is disturbed by it later."""

    def restore(self, state: State) -> Handle:
        """A new handle from a state with since == 0. Raises StateError if it does not fit."""

    def reserve(self, position: int) -> Handle:
        """A handle for a state at `position` that comes in parts; until it is whole it takes nothing but `fill`."""

    def fill(self, handle: Handle, part: Part) -> None:
        """Take in a part: rows in order, from 0 to the reserved position; each recurrent tensor once.

        With the last part the handle is whole, as if restored. Raises StateError if a part does not fit: the handle
        is then of no use but to be released.
        """

    def clone(self, handle: Handle) -> Handle:
        """An independent copy of the handle."""

    def release(self, handle: Handle) -> None:
        """Give the handle's memory back; using it afterwards raises ProgramError. Twice is allowed."""

    def close(self) -> None:
        """Release every handle and the program itself."""


class Runtime(Protocol):
    name: str

    def devices(self) -> list[Device]:
        """All devices of this runtime: usable ones, and for the others why not."""

    def load(self, artifact: Artifact, *, device: str | None = None, threads: int | None = None) -> Program:
        """Load an artifact of this runtime. Raises ProgramError or RuntimeUnavailable."""


def prepare(program: Program) -> None:
    """Have a program do now what it otherwise does when it is first needed, if there is such a thing."""
    more = getattr(program, "prepare", None)  # programs from elsewhere may have none
    if more is not None:
        more()


def _installed() -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group="ssmd.runtimes")}


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that no processor has, before a library tries to start them. Raises ProgramError."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ProgramError(f"threads must be between 1 and {MOST_THREADS}, not {threads}")


def runtime_names() -> list[str]:
    """Names of all runtimes that are registered here, usable or not."""
    return sorted(_installed())


def get_runtime(name: str) -> Runtime:
    """The runtime `name`. Raises RuntimeUnavailable with what to install, or whose fault it is, when there is none."""
    found = _installed().get(name)
    if found is None:
        raise RuntimeUnavailable(f"no runtime is named {name!r}; there are: {', '.join(runtime_names()) or 'none'}")
    try:
        runtime: Runtime = found.load()()
    except ImportError as err:
        if found.dist is not None and found.dist.name != DISTRIBUTION:
            raise RuntimeUnavailable(
                f"runtime {name!r} cannot be imported ({err}); what it needs is told by its package, {found.dist.name}"
            ) from err
        raise RuntimeUnavailable(f"runtime {name!r} is not installed ({err}); install it with: {to_add(name)}") from err
    except (Exception, SystemExit) as err:  # whatever a package from elsewhere does: other runtimes go on
        package = found.value if found.dist is None else found.dist.name
        why = f"{type(err).__name__}: {err}"
        raise RuntimeUnavailable(f"runtime {name!r} fails when it is loaded ({why}); its package is {package}") from err
    return runtime
