"""An answer as it comes to the terminal: what is said is shown, what is thought is only told of, and all is kept."""

from __future__ import annotations

from collections.abc import Callable

from ssmd.text.messages import THINK, THINK_END


class Written:
    """Collects one answer. show: takes its text. thinking: called with whether the model thinks, when that changes.
    begun: the text that it has already, which is not shown again.
    """

    def __init__(self, show: Callable[[str], None], thinking: Callable[[bool], None], begun: str = "") -> None:
        self._show, self._thinking = show, thinking
        self._parts = [begun] if begun else []
        self._thinks = THINK in begun and THINK_END not in begun
        self._told = False

    @property
    def text(self) -> str:
        """All of it, the reasoning in <think>…</think>, as messages have it."""
        return "".join(self._parts)

    def think(self, text: str) -> None:
        """Take in reasoning."""
        if text:
            self._parts.append(text if self._thinks else f"{THINK}\n{text}")
            self._thinks = True
            self._tell(True)

    def say(self, text: str) -> None:
        """Take in what is said."""
        if text:
            self._tell(False)
            self._parts.append(f"\n{THINK_END}\n\n{text}" if self._thinks else text)
            self._thinks = False
            self._show(text)

    def pause(self) -> None:
        """Nothing more comes for now."""
        self._tell(False)

    def _tell(self, on: bool) -> None:
        if on != self._told:
            self._told = on
            self._thinking(on)
