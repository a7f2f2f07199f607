"""The state of a model after `position` tokens: its tensors, their specification, and the rules to compare two.

Canonical form (docs/state-layout.md): little-endian, per layer, no batch axis.

    conv   [C, K-1]                 oldest -> newest
    ssm    [H, P, N]  (Mamba-1: [D, N]; gated DeltaNet: [H, V, K])
    key    [kv_heads, n, head_dim]  n = rows; after RoPE where the family has it
    value  [kv_heads, n, head_dim]
    window_key    [kv_heads, w, head_dim]  the rows of the last w positions, oldest -> newest; zeros before position 0
    window_value  [kv_heads, w, head_dim]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["conv", "ssm", "key", "value", "window_key", "window_value"]
KINDS: tuple[Kind, ...] = ("conv", "ssm", "key", "value", "window_key", "window_value")
WINDOWS: tuple[Kind, ...] = ("window_key", "window_value")
AXES: dict[Kind, tuple[int, ...]] = {  # how many can be
    "conv": (2,),
    "ssm": (2, 3),
    "key": (2,),
    "value": (2,),
    "window_key": (3,),
    "window_value": (3,),
}
DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
FLOAT16_MAX = 65504.0
LAYOUT_VERSION = 1


class StateError(ValueError):
    """A state that does not fit a program, or an invalid specification."""


@dataclass(frozen=True)
class TensorSpec:
    """One state tensor. shape: canonical, without the token axis of key and value: (kv_heads, head_dim).

    Raises StateError, which names an unknown kind.
    """

    name: str
    kind: Kind
    layer: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise StateError(
                f"state tensor {self.name!r} is of kind {self.kind!r}, which this version of ssmd does not know; it "
                f"knows {', '.join(KINDS)}. Update ssmd, or take the conversation without states"
            )
        if self.dtype not in DTYPES:
            raise StateError(f"state tensor {self.name!r}: dtype {self.dtype!r}, expected one of {sorted(DTYPES)}")
        if len(self.shape) not in AXES[self.kind] or any(d < 1 for d in self.shape):
            raise StateError(f"state tensor {self.name!r}: shape {self.shape} is not possible for a {self.kind}")

    @property
    def recurrent(self) -> bool:
        """True for tensors of fixed size (conv, ssm, windows), which are stored whole and cannot be cut back.

        False for those that grow by a row a token (key, value).
        """
        return self.kind not in ("key", "value")

    @property
    def channels_first(self) -> bool:
        """True for conv [C, K-1] and Mamba-1's ssm [D, N].

        Graphs hold these transposed, channels last, so that operations over all channels run along memory.
        """
        return self.recurrent and len(self.shape) == 2

    def canonical(self, held: Any) -> Any:
        """View a recurrent tensor of a graph in canonical form; what is assigned to the view changes the tensor.

        held: an array of a graph's shape (ssmd/authoring/flat.py): a window (G, W, D) or (G, D, W), others (1, ...).
        """
        if self.kind in WINDOWS:
            return held if self.kind == "window_key" else held.swapaxes(1, 2)
        return held[0].T if self.channels_first else held[0]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    def shape_at(self, rows: int) -> tuple[int, ...]:
        """Return the canonical shape with `rows` tokens of KV. Recurrent tensors do not depend on them."""
        return self.shape if self.recurrent else (self.shape[0], rows, self.shape[1])

    def nbytes_at(self, rows: int) -> int:
        return int(np.prod(self.shape_at(rows))) * self.numpy_dtype.itemsize


@dataclass(frozen=True)
class StateSpec:
    """All state tensors of a model, in layer order."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if not names:
            raise StateError("a state specification needs at least one tensor")
        if len(set(names)) != len(names):
            raise StateError(f"state tensor names repeat: {sorted({n for n in names if names.count(n) > 1})}")

    @property
    def recurrent(self) -> tuple[TensorSpec, ...]:
        return tuple(t for t in self.tensors if t.recurrent)

    @property
    def rows(self) -> tuple[TensorSpec, ...]:
        """The key and value tensors: those that grow by one row a token."""
        return tuple(t for t in self.tensors if not t.recurrent)

    @cached_property
    def row_columns(self) -> dict[str, slice]:
        """The place of each row tensor when all rows of one token lie one after the other.

        All key tensors of one shape come first, in layer order, then the next kind or shape. Each is
        [kv_heads, head_dim].
        """
        groups: dict[tuple[str, tuple[int, ...]], list[TensorSpec]] = {}
        for t in self.rows:
            groups.setdefault((t.kind, t.shape), []).append(t)
        columns: dict[str, slice] = {}
        at = 0
        for t in (t for group in groups.values() for t in group):
            columns[t.name] = slice(at, at + t.shape[0] * t.shape[1])
            at = columns[t.name].stop
        return columns

    @cached_property
    def row_values(self) -> int:
        """The number of values in one token's rows, all layers together."""
        return sum(t.shape[0] * t.shape[1] for t in self.rows)

    def nbytes_at(self, position: int, since: int = 0) -> int:
        """Return the bytes of a canonical state at `position` with KV rows from `since` on."""
        return sum(t.nbytes_at(position - since) for t in self.tensors)

    def digest(self) -> str:
        """A hash of names, kinds, layers and shapes, not of dtypes or context, that restores compare: 32 hex digits."""
        layout = [[t.name, t.kind, t.layer, list(t.shape)] for t in self.tensors]
        text = json.dumps([LAYOUT_VERSION, layout], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"name": t.name, "kind": t.kind, "layer": t.layer, "shape": list(t.shape), "dtype": t.dtype}
            for t in self.tensors
        ]

    @staticmethod
    def from_json(entries: list[dict[str, Any]]) -> StateSpec:
        """Read a spec from JSON. Raises StateError if `to_json` cannot have written it."""
        try:
            return StateSpec(
                tuple(
                    TensorSpec(
                        str(e["name"]),
                        e["kind"],
                        int(e["layer"]),
                        tuple(int(d) for d in e["shape"]),
                        e["dtype"],
                    )
                    for e in entries
                )
            )
        except (KeyError, TypeError) as err:
            raise StateError(f"state specification is malformed: {err!r}") from err


@dataclass(frozen=True, eq=False)
class State:
    """A canonical copy of a program's state after `position` tokens.

    KV tensors hold the rows [since, position); recurrent tensors are whole. Arrays may be views that are not
    contiguous. They are never written after the State was made.
    """

    position: int
    since: int
    tensors: Mapping[str, NDArray[Any]]

    def check(self, spec: StateSpec) -> None:
        """Check that names, shapes and dtypes are those of `spec` at this position, all finite. Raises StateError."""
        if not 0 <= self.since <= self.position:
            raise StateError(f"state rows [{self.since}, {self.position}) are not a range")
        expected = {t.name for t in spec.tensors}
        if set(self.tensors) != expected:
            raise StateError(f"state tensors differ from the program's: {sorted(set(self.tensors) ^ expected)}")
        for t in spec.tensors:
            array = self.tensors[t.name]
            shape = t.shape_at(self.position - self.since)
            if array.shape != shape:
                raise StateError(f"state tensor {t.name!r} has shape {array.shape}, the program needs {shape}")
            if array.dtype not in DTYPES.values():
                raise StateError(f"state tensor {t.name!r} has dtype {array.dtype}, expected float32 or float16")
            if not _finite(array):
                raise StateError(f"state tensor {t.name!r} holds values that are not finite")


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a state that is being read: KV rows [first, last) of all row tensors, or some whole recurrent tensors.

    Arrays have the shapes of a State. They are finite, float16 or float32, and never written.
    """

    first: int
    last: int
    tensors: Mapping[str, NDArray[Any]]

    def check(self, spec: StateSpec) -> None:
        """Check that the tensors belong to `spec`, with its shapes and dtypes. Raises StateError.

        It does not check that they are finite.
        """
        known = {t.name: t for t in spec.tensors}
        rows = {t.name for t in spec.rows}
        if self.last > self.first >= 0 and not rows <= set(self.tensors):
            raise StateError(f"rows [{self.first}, {self.last}) are not those of all layers")
        for name, array in self.tensors.items():
            if name not in known:
                raise StateError(f"state tensor {name!r} is none of the program's: {sorted(known)}")
            shape = known[name].shape_at(self.last - self.first)
            if array.shape != shape or array.dtype not in DTYPES.values():
                raise StateError(f"state tensor {name!r} is {array.dtype} {array.shape}, the program needs {shape}")


def of_lane(name: str, lane: int) -> str:
    """Return the name of one lane's own tensor in a graph for a decode step of several streams."""
    return f"{name}_lane{lane}"


def narrowed(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return float32 rows as float16 if that is `dtype`, never rounded to infinity; others unchanged."""
    if dtype == DTYPES["float16"] != rows.dtype:
        return rows.clip(-FLOAT16_MAX, FLOAT16_MAX).astype(dtype)
    return rows


def _finite(array: NDArray[Any]) -> bool:
    """Return True if no value is infinite or NaN.

    In float16 such values have all exponent bits set; this check is 4 times as fast.
    """
    if array.dtype == DTYPES["float16"]:
        return not array.size or int((array.view(np.uint16) & 0x7FFF).max()) < 0x7C00
    return bool(np.isfinite(array).all())
