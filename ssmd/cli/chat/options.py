"""Options of a chat in the terminal: sampling, stop texts and keep-alive, set on the command line or by `/set`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ssmd.machine.duration import parse_duration
from ssmd.machine.spelling import did_you_mean, printable
from ssmd.model.defaults import OPTIONS, Option, full_name

NAMES = (*OPTIONS, "seed", "stop", "keep_alive")
_SEED = Option(-(2**63), 2**63 - 1, whole=True)


@dataclass(frozen=True)
class ChatOptions:
    """The fields of requests that a user set. Others have the model's or the daemon's default.

    Raises ValueError that names the field and its value.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)  # by names of OPTIONS
    seed: int | None = None
    stop: tuple[str, ...] = ()
    keep_alive: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.sampling.items():
            OPTIONS[name].checked(name, value)
        if self.seed is not None:
            _SEED.checked("seed", self.seed)
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
        sent: dict[str, Any] = {**self.sampling}
        if self.seed is not None:
            sent["seed"] = self.seed
        if self.stop:
            sent["stop"] = list(self.stop)
        if self.keep_alive is not None:
            seconds = re.fullmatch(r"-?[0-9]+", self.keep_alive)
            sent["keep_alive"] = int(self.keep_alive) if seconds else self.keep_alive
        return sent

    def changed(self, name: str, text: str) -> ChatOptions:
        """Return a copy with one field set from a user's text; `default` resets it. Raises ValueError."""
        name = full_name(name)
        if name not in NAMES:
            meant = did_you_mean(name, NAMES)
            raise ValueError(f"there is no {printable(name)!r} to set{meant}; there are: {', '.join(NAMES)}")
        unset = text == "default"
        if name in OPTIONS:
            rest = {own: value for own, value in self.sampling.items() if own != name}
            return replace(self, sampling=rest if unset else {**rest, name: OPTIONS[name].read(name, text)})
        if name == "stop":
            return replace(self, stop=() if unset else (*self.stop, text))
        if name == "seed":
            return replace(self, seed=None if unset else int(_SEED.read(name, text)))
        return replace(self, keep_alive=None if unset else text)

    def lines(self) -> list[str]:
        """Return a line for each option with its value, for the user."""
        unset = {"seed": "(another each time)", "keep_alive": "(the daemon's)", "stop": "(none)"}
        own = {**self.sampling, "seed": self.seed, "keep_alive": self.keep_alive}
        values = {**dict.fromkeys(OPTIONS, "(the model's)"), **unset}
        values |= {name: str(value) for name, value in own.items() if value is not None}
        if self.stop:
            values["stop"] = ", ".join(map(repr, self.stop))
        width = max(map(len, NAMES))
        return [f"{name:{width}} {values[name]}" for name in NAMES]
