"""The options of answers: the sampling, the stops and the length that a user sets by option or by `/set`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ssmd.machine.duration import parse_duration
from ssmd.model.defaults import OPTIONS, Option


@dataclass(frozen=True)
class Manner:
    """Fields of a request; None stands for the model's or the daemon's default.

    Raises ValueError that names the field and its value.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    keep_alive: str | None = None

    def __post_init__(self) -> None:
        for name, option in _NUMBERS.items():
            if (value := getattr(self, name)) is not None:
                option.checked(name, value)
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
        """Return the fields of a chat completion's body that the user set."""
        sent = {name: value for name in NAMES if (value := getattr(self, name)) not in (None, ())}
        if self.keep_alive is not None and re.fullmatch(r"-?[0-9]+", self.keep_alive):
            sent["keep_alive"] = int(self.keep_alive)
        return sent | ({"stop": list(self.stop)} if self.stop else {})

    def changed(self, name: str, text: str) -> Manner:
        """Return a copy with one field set from a user's text; `default` resets it. Raises ValueError."""
        if name not in NAMES:
            raise ValueError(f"there is no {name!r} to set; there are: {', '.join(NAMES)}")
        if text == "default":
            return self._with(name, getattr(Manner(), name))
        if name not in _NUMBERS:
            return self._with(name, (*self.stop, text) if name == "stop" else text)
        option = _NUMBERS[name]
        return self._with(name, option.read(name, text))

    def _with(self, name: str, value: Any) -> Manner:
        return replace(self, **{name: value})

    def lines(self) -> list[str]:
        """List all fields with their values, for people."""
        shown = {name: getattr(self, name) for name in NAMES}
        unset = {"seed": "(another each time)", "keep_alive": "(the daemon's)", "stop": "(none)"}
        model = "(the model's)"
        return [f"{n:15} {unset.get(n, model) if value in (None, ()) else _said(value)}" for n, value in shown.items()]


NAMES = tuple(one.name for one in fields(Manner))
_NUMBERS = {
    **{name: OPTIONS[name] for name in ("temperature", "top_p", "top_k", "min_p", "repeat_last_n", "max_tokens")},
    "repeat_penalty": OPTIONS["repetition_penalty"],
    "seed": Option(-(2**63), 2**63 - 1, whole=True),
}


def _said(value: Any) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)
