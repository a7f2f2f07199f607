"""The interface of all runtimes, and the search for installed ones.

A runtime is a class named by an entry point of the group "ssmd.runtimes". A runtime works if it passes
`tests/contract`; docs/runtime-contract.md lists the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.installation import DISTRIBUTION, to_add
from ssmd.machine.processor import MOST_THREADS
from ssmd.model.state import Part, State, StateSpec
from ssmd.runtime.info import entry_point_of, runtime_names

if TYPE_CHECKING:
    from ssmd.model.artifact import Artifact

Logits = NDArray[np.float32]
Handle = Any  # device-resident and opaque: only the program that made it can read it


class ProgramError(ValueError):
    """A call that a program refuses before it computes anything. The handle does not change."""


class StateLost(RuntimeError):
    """The loss of handles' state with the device, or in a step that failed half way. The handles can only be released.

    The program works again, or tries to at its next call.
    """


class RuntimeUnavailable(RuntimeError):
    """A runtime that is not installed or cannot run here; the message says what to install or change."""


@dataclass(frozen=True)
class Device:
    """A device of a runtime. why_not: "" if it is usable here, else the reason and the remedy."""

    name: str
    description: str
    why_not: str = ""


@dataclass(frozen=True)
class FormTime:
    """The time of one form of a kernel on this device. `chosen`: the program computes by it."""

    kernel: str  # and the number of its like in the model
    form: str
    us: float
    chosen: bool


class Program(Protocol):
    """A loaded artifact on a device: prefill buckets plus decode. The implementation serialises calls."""

    spec: StateSpec
    buckets: tuple[int, ...]
    context: int | None
    vocabulary: int
    producer: str  # runtime, its version, device, threads; an exact resume needs the same, and the same build
    threads: int  # threads of the processor that compute a step

    def new_state(self) -> Handle:
        """Return a handle at position 0."""

    def prefill(self, handle: Handle, tokens: Sequence[int]) -> Logits:
        """Feed 1 <= len(tokens) <= max(buckets) tokens. Returns the last one's float32 logits [vocab], fresh."""

    def decode(self, handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        """Feed one token to each of n handles. Returns float32 logits [n, vocab], a fresh array."""

    def position(self, handle: Handle) -> int:
        """Return the number of tokens fed so far."""

    def save(self, handle: Handle, since: int = 0) -> State:
        """Return a canonical copy with KV rows from `since` on. It and the handle do not affect each other later."""

    def restore(self, state: State) -> Handle:
        """Return a new handle from a state with since == 0. Raises StateError if it does not fit."""

    def reserve(self, position: int) -> Handle:
        """Return a handle for a state at `position` that comes in parts. Until it is whole only `fill` accepts it."""

    def fill(self, handle: Handle, part: Part) -> None:
        """Take in a part: rows in order, from 0 to the reserved position; each recurrent tensor once.

        With the last part the handle is whole, as if restored. Raises StateError if a part does not fit: the handle
        can then only be released.
        """

    def clone(self, handle: Handle) -> Handle:
        """Return an independent copy of the handle."""

    def release(self, handle: Handle) -> None:
        """Free the handle's memory. Later uses raise ProgramError, but a second release is allowed."""

    def close(self) -> None:
        """Release every handle and the program itself."""


class Runtime(Protocol):
    name: str

    def devices(self) -> list[Device]:
        """Return all devices of this runtime, each unusable one with the reason."""

    def load(self, artifact: Artifact, *, device: str | None = None, threads: int | None = None) -> Program:
        """Load an artifact of this runtime. Raises ProgramError or RuntimeUnavailable."""


def prepare(program: Program) -> None:
    """Let a program do work now that it would otherwise do on first need, if it has any."""
    more = getattr(program, "prepare", None)  # a program from elsewhere may not have it
    if more is not None:
        more()


def form_times(program: Program) -> tuple[FormTime, ...]:
    """Return the times by which a program chose among forms of its kernels on this device; none if it measures none."""
    found = getattr(program, "form_times", None)  # a program from elsewhere may not have it
    return () if found is None else tuple(found())


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that no processor has, before a library tries to start them. Raises ProgramError."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ProgramError(f"threads must be between 1 and {MOST_THREADS}, not {threads}")


def get_runtime(name: str) -> Runtime:
    """Return the runtime `name`. Raises RuntimeUnavailable, which says what to install or which package fails."""
    found = entry_point_of(name)
    if found is None:
        raise RuntimeUnavailable(f"no runtime is named {name!r}; there are: {', '.join(runtime_names()) or 'none'}")
    try:
        runtime: Runtime = found.load()()
    except ImportError as err:
        if found.dist is not None and found.dist.name != DISTRIBUTION:
            raise RuntimeUnavailable(
                f"runtime {name!r} cannot be imported ({err}); see the requirements of its package, {found.dist.name}"
            ) from err
        raise RuntimeUnavailable(f"runtime {name!r} is not installed ({err}); install it with: {to_add(name)}") from err
    except (Exception, SystemExit) as err:  # a package from elsewhere may raise any error; other runtimes go on
        package = found.value if found.dist is None else found.dist.name
        why = f"{type(err).__name__}: {err}"
        raise RuntimeUnavailable(f"runtime {name!r} fails when it is loaded ({why}); its package is {package}") from err
    return runtime
