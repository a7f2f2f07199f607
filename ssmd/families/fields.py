"""The fields of a config.json, read one by one. An invalid one is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SIZE = 1 << 22  # larger than any dimension of a model that could run here


class FamilyError(ValueError):
    """A config that its family does not support; the message names the field and its value."""


class Recorded(Mapping[str, Any]):
    """A config that records in `asked` the fields that were looked up one by one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self._config[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


@dataclass(frozen=True)
class Fields:
    """A config.json. Values in `fixed` replace those of the config.

    A field that is absent or null takes the family's default in `defaults`, then the default of the call that reads it.
    A field without a default is required.
    """

    config: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        if name in self.fixed:
            return self.fixed[name]
        value = self.config.get(name)
        return self.defaults.get(name) if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Read a dimension or a count: at least 1. Raises FamilyError."""
        value = self._value(name, default)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise FamilyError(f"config.json: {name} is {value!r}, expected a whole number from 1 to {MAX_SIZE}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a positive, finite number. Raises FamilyError."""
        value = self._value(name, default)
        if not _positive(value):
            raise FamilyError(f"config.json: {name} is {value!r}, expected a positive number")
        return float(value)

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Read as many positive, finite numbers as the default has. Raises FamilyError."""
        value = self._value(name, list(default))
        if not isinstance(value, list) or len(value) != len(default) or not all(map(_positive, value)):
            raise FamilyError(f"config.json: {name} is {value!r}, expected {len(default)} positive numbers")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise FamilyError(f"config.json: {name} is {value!r}, expected true or false")
        return value

    def silu(self, name: str) -> None:
        """Check that the activation is SiLU, which is also called swish. Raises FamilyError."""
        if self.get(name) != "swish":
            self.only(name, "silu", "silu")

    def only(self, name: str, allowed: Any, default: Any) -> None:
        """Check that the field is `allowed`. Raises FamilyError."""
        value = self._value(name, default)
        if value != allowed:
            raise FamilyError(f"config.json: {name} is {value!r}; only {allowed!r} is supported")

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise FamilyError(f"config.json: {name} is missing")
        return value


def _positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def divides(part: int, whole: int, part_name: str, whole_name: str) -> int:
    """Return whole // part. Raises FamilyError if part does not divide whole."""
    if whole % part:
        raise FamilyError(f"config.json: {whole_name} = {whole} is not a multiple of {part_name} = {part}")
    return whole // part
