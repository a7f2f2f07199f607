"""Trust domains: which owners' rows a caller can read, and which owner its new rows get."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Domain:
    """The owners whose rows a caller sees in a store, and the owner of what it writes."""

    owner: str = ""  # of new rows; "": no owner
    sees: tuple[str, ...] | None = None  # owners whose rows it sees; None: all

    def has(self, owner: object) -> bool:
        """Return True if rows of this owner are visible."""
        return self.sees is None or owner in self.sees


EVERYBODY = Domain()  # sees all rows
NOBODY = Domain(sees=())
