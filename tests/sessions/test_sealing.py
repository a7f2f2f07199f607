"""Names and keys of sealed states, and what opens a part of one."""

from __future__ import annotations

import pytest

from ssmd.sessions.checkpoint import IN_MEMORY, ON_DISK, Seal, SealedLine
from ssmd.sessions.line import Line


def test_names_and_keys_differ_in_all_that_they_are_made_of() -> None:
    line, other = Line.of(range(200)), Line.of([*range(199), 7])
    seen = set()
    for seal in (ON_DISK, IN_MEMORY, Seal("memory", bytes(32))):
        for layout, lineage in (("a", "b"), ("a", "c"), ("b", "a")):
            for hashed in (line.hash(199), line.hash(200), other.hash(200)):
                seen.update([seal.key(layout, lineage, hashed), *seal.names(layout, lineage, [hashed])])
    assert len(seen) == 2 * 27


def test_a_part_opens_in_its_own_place_only() -> None:
    line = Line.of(range(200))
    here = SealedLine(ON_DISK, "layout", "lineage", line)
    closed = here.close(b"numbers", ("rows", 0, 64), 64)
    assert closed != here.close(b"numbers", ("rows", 0, 64), 64), "a nonce never comes twice"
    assert SealedLine(ON_DISK, "layout", "lineage", line).open(closed, ("rows", 0, 64), 64) == b"numbers"
    places = [(("rows", 0, 65), 64), (("recurrent", 0, 64), 64), (("rows", 0, 64), 65)]
    for part, position in places:
        with pytest.raises(ValueError, match="does not open"):
            here.open(closed, part, position)
    for wrong in (closed[:-1], closed[:5], b"", bytes(len(closed))):
        with pytest.raises(ValueError, match="does not open"):
            here.open(wrong, ("rows", 0, 64), 64)
    with pytest.raises(ValueError, match="does not open"):
        SealedLine(IN_MEMORY, "layout", "lineage", line).open(closed, ("rows", 0, 64), 64)
