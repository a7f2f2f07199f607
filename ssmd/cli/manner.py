"""How answers are to be: the sampling, the stops and the length that a person asks for, by option or by `/set`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from ssmd.machine.duration import parse_duration

_MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class Manner:
    """Fields of a request, None where the daemon's own is meant. Raises ValueError naming the field and its value."""

    temperature: float = 0.2
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int = 2048
    keep_alive: str | None = None

    def __post_init__(self) -> None:
        for name, (_, least, most) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} is {value}, expected {_kind(name)}")
        if self.top_p == 0:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0")
        if not all(self.stop):
            raise ValueError("stop is empty, expected a text")
        if self.keep_alive is not None:
            try:
                parse_duration(self.keep_alive)
            except ValueError:
                wrong = f"keep_alive is {self.keep_alive[:80]!r}"
                raise ValueError(f"{wrong}, expected a time such as 5m, 0, or -1 for ever") from None

    def fields(self) -> dict[str, Any]:
        """What of a chat completion's body they are; what asks for nothing is left out."""
        asked = {name: getattr(self, name) for name in NAMES}
        if self.repeat_penalty == 1:
            del asked["repeat_last_n"]
        if self.keep_alive is not None and re.fullmatch(r"-?[0-9]+", self.keep_alive):
            asked["keep_alive"] = int(self.keep_alive)
        off = {"top_k": 0, "min_p": 0, "repeat_penalty": 1, "stop": (), "seed": None, "keep_alive": None}
        sent = {name: value for name, value in asked.items() if name not in off or value != off[name]}
        return sent | ({"stop": list(self.stop)} if self.stop else {})

    def changed(self, name: str, text: str) -> Manner:
        """The same with one of them as a person writes it; `default` is what it is at first. Raises ValueError."""
        if name not in NAMES:
            raise ValueError(f"there is no {name!r} to set; there are: {', '.join(NAMES)}")
        if text == "default":
            return self._with(name, getattr(Manner(), name))
        if name not in _NUMBERS:
            return self._with(name, (*self.stop, text) if name == "stop" else text)
        read = _NUMBERS[name][0]
        try:
            return self._with(name, read(text))
        except (ValueError, OverflowError) as err:
            if str(err).startswith(name):
                raise
            raise ValueError(f"{name} is {text[:80]!r}, expected {_kind(name)}") from None

    def _with(self, name: str, value: Any) -> Manner:
        return replace(self, **{name: value})

    def lines(self) -> list[str]:
        """Each with its value, for people."""
        shown = {name: getattr(self, name) for name in NAMES}
        unset = {"seed": "(another each time)", "keep_alive": "(the daemon's)", "stop": "(none)"}
        return [f"{name:15} {unset[name] if value in (None, ()) else _said(value)}" for name, value in shown.items()]


NAMES = tuple(one.name for one in fields(Manner))
_NUMBERS: dict[str, tuple[Callable[[str], float], float, float]] = {  # how it is read, least, most
    "temperature": (float, 0.0, 2.0),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, 0, _MAX_INT),
    "min_p": (float, 0.0, 1.0),
    "repeat_penalty": (float, 0.01, 100.0),
    "repeat_last_n": (int, -1, _MAX_INT),
    "seed": (int, -(2**63), 2**63 - 1),
    "max_tokens": (int, 1, _MAX_INT),
}


def _kind(name: str) -> str:
    read, least, most = _NUMBERS[name]
    bounds = f"from {least:g} to {most:g}" if most <= 100 else f"of {least:g} or more" if least >= -1 else ""
    return f"a {'whole ' if read is int else ''}number {bounds}".rstrip()


def _said(value: Any) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)
