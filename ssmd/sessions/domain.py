"""Trust domains: whose rows of a store one who asks can see, and whose those are that it writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Domain:
    """What is seen of a store, and written into it.

    owner: whose what is new becomes, "" for nobody's. sees: the owners whose rows are there for it; None: everybody's.
    """

    owner: str = ""
    sees: tuple[str, ...] | None = None

    def has(self, owner: object) -> bool:
        """Whether rows of this owner are seen."""
        return self.sees is None or owner in self.sees


EVERYBODY = Domain()  # who sees all
NOBODY = Domain(sees=())
