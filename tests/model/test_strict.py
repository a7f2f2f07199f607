"""The meter of JSON from outside: it counts what a reader would make, and costs little whatever the bytes are."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ssmd.model import strict
from ssmd.model.strict import too_many

SIGNS = b"[{,"
MIB = 1 << 20
MANY = 250_001
BODIES: dict[str, Callable[[], bytes]] = {  # of 32 MiB, each with signs enough in a text to be looked at
    "empty texts": lambda: b'"' + b"," * MANY + b'"' + b'""' * (16 * MIB),
    "one text": lambda: b'"' + b"," * (32 * MIB) + b'"',
    "escaped quotes": lambda: b'"' + b"," * MANY + b'\\"' * (16 * MIB) + b'"',
    "backslashes": lambda: b'"' + b"," * MANY + b"\\" * (32 * MIB) + b'"',
}


def test_signs_outside_of_texts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader counts that looks at one byte after the other, wherever the parts end."""
    chance = random.Random(5)
    for _ in range(3000):
        raw = bytes(chance.choices(b'"\\[{,a', (3, chance.choice((0, 1, 9)), 1, 1, 1, 1), k=chance.randrange(60)))
        monkeypatch.setattr(strict, "_PART_BYTES", chance.randrange(1, 9))
        count = _count_ref(raw)
        assert not too_many(raw, count, SIGNS), raw
        assert count == 0 or too_many(raw, count - 1, SIGNS), raw


def _count_ref(raw: bytes) -> int:
    count, within, escaped = 0, False, False
    for byte in raw:
        if byte == ord('"') and not escaped:
            within = not within
        count += not within and byte in SIGNS
        escaped = byte == ord("\\") and not escaped
    return count


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_takes_few_steps(name: str) -> None:
    """None for each text of it; between any two steps others have their turn, or the work ends."""
    raw = BODIES[name]()
    calls = asked = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event.endswith("call")

    def go_on() -> None:
        nonlocal asked
        asked += 1

    sys.setprofile(count)
    try:
        assert not too_many(raw, MANY - 1, SIGNS, go_on)
    finally:
        sys.setprofile(None)
    assert 128 <= asked <= 130
    assert calls < 5000
