"""A private list of hashes, in a file that grows by lines; one that others could have written counts as empty."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ssmd.machine.privatefile import NOFOLLOW, read_own

MOST_BYTES = 1 << 20  # 15,000 lines; a longer list begins anew
_LINE = re.compile(rb"[0-9a-f]{64}")


def add(file: Path, digest: str) -> None:
    """Put a sha256 on the list, unless it is there. Raises OSError."""
    line, kept = digest.encode(), _lines(file)
    if line in kept:
        return
    if not kept or file.stat().st_size + len(line) + 2 > MOST_BYTES:
        file.unlink(missing_ok=True)  # it cannot be trusted, is empty, or is too long
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NOFOLLOW, 0o600)
    try:
        os.write(descriptor, b"\n" + line + b"\n")  # one write: whole beside other writers, and after a torn line
    finally:
        os.close(descriptor)


def has(file: Path, digest: str) -> bool:
    """Return True if a sha256 is on the list. A list that another user could have written counts as empty."""
    return digest.encode() in _lines(file)


def _lines(file: Path) -> set[bytes]:
    try:
        found = read_own(file, MOST_BYTES)
    except OSError:
        return set()
    return {line for line in found.split(b"\n") if _LINE.fullmatch(line)}
