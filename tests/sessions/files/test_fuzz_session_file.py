"""Mutated `.ssmd` files: refused, or sound; nothing outside the data dir; memory within twice the limit.

SSMD_FUZZ says how many (150); the same seed and number are always the same file.
"""

from __future__ import annotations

import collections
import os
import re
from pathlib import Path

from fuzz_session_file import apart

CASES = int(os.environ.get("SSMD_FUZZ", "150"))
SEED = os.environ.get("SSMD_FUZZ_SEED", "1")


def test_mutated_files_are_refused_or_sound(tmp_path: Path) -> None:
    told = apart(tmp_path, SEED, 0, CASES)
    assert max(told["mapped"], told["resident"]) <= told["limit"] // 2, "files of some KB: it leaks"
    assert sum(told["outcomes"].values()) == CASES
    became = collections.Counter[str]()
    for what, count in told["outcomes"].items():
        became[what.partition("/")[2]] += count
    assert min(became[what] for what in ("refused", "imported", "text only")) >= CASES // 50


def test_files_that_ask_for_all_the_memory(tmp_path: Path) -> None:
    told = apart(tmp_path, "bombs", 0, 0)
    assert told["outcomes"] == {"bombs/imported": 1, "bombs/refused": 8}
    reasons = ("states unfold to", "not a JSON object", "no metadata", "recursion", "written_by")
    for reason in (*reasons, "larger"):
        assert re.search(reason, told["said"]), f"none was refused because {reason}"
