"""Rows of text below each other, as plain lines: quick to make, and whole in a file or a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each row as a line; every column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
