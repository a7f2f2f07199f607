"""Amounts of bytes as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"": 1, "b": 1} | {
    prefix + end: base**power for power, prefix in enumerate("kmgt", 1) for end, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z]{0,3})", re.ASCII)
MAX_BYTES = (1 << 63) - 1


def parse_size(text: str) -> int:
    """Return the bytes of `8GiB`, `500 MB`, `1.5GB` or `1000000`. Raises ValueError.

    A kB has 1,000 bytes, a KiB 1,024.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise ValueError("expected bytes, or a number with a unit: kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    nbytes = int(Decimal(found[1]) * unit)
    if nbytes > MAX_BYTES:
        raise ValueError("more than any disk holds")
    return nbytes


def show_size(nbytes: int) -> str:
    """Write a size in units of 1,000: `0.9 kB`, `22.6 MB`, `8.6 GB`."""
    units = ("kB", "MB", "GB", "TB")
    power = next((p for p in range(1, len(units)) if nbytes < 999.95 * 1000**p), len(units))
    return f"{nbytes / 1000**power:.1f} {units[power - 1]}"
