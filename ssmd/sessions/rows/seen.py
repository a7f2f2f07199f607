"""What of a table a trust domain sees, as a condition in statements that are built once."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, bindparam, or_

from ssmd.sessions.domain import Domain


def seen(owner: Any) -> Any:
    """The condition that a row with this column is seen; `by` gives a statement its values."""
    return or_(bindparam("everybody", type_=Boolean), owner.in_(bindparam("owners", expanding=True)))


def by(domain: Domain) -> dict[str, Any]:
    """Values of the condition."""
    everybody = domain.sees is None
    return {"everybody": everybody, "owners": ("",) if everybody else domain.sees}  # of an empty list is a query made
