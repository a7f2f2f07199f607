"""Mutated `.ssmd` files: refused, or sound; nothing outside the data dir; memory within twice the limit.

SSMD_FUZZ says how many (300); the same seed and number are always the same file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = int(os.environ.get("SSMD_FUZZ", "300"))
SEED = os.environ.get("SSMD_FUZZ_SEED", "1")
HERE = Path(__file__).parents[2]


def run(tmp_path: Path, seed: str, count: int) -> dict[str, Any]:
    for folder in ("work", "home"):
        (tmp_path / folder).mkdir(mode=0o700)
    places = [str(HERE), str(HERE.parent), str(HERE.parent / "runtimes")]
    # One arena: each more would map 64 MiB that is not used.
    settings = {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": os.pathsep.join(places), "HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-B", str(HERE / "fuzz_session_file.py"), str(tmp_path / "work"), seed, "0", str(count)],
        env={**os.environ, **settings, "TMPDIR": str(tmp_path / "home")},
        cwd=tmp_path / "home",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = {**json.loads(done.stdout), "said": done.stderr}
    print(told)
    assert list((tmp_path / "home").iterdir()) == []
    assert {p.name for p in (tmp_path / "work").iterdir()} <= {"data", "made", "bombs", "in.ssmd", "out.ssmd"}
    data = {"sessions.sqlite3", "sessions.sqlite3-wal", "sessions.sqlite3-shm"}
    assert {p.name for p in (tmp_path / "work" / "data").iterdir()} <= data
    return told


def test_mutated_files_are_refused_or_sound(tmp_path: Path) -> None:
    told = run(tmp_path, SEED, CASES)
    assert max(told["mapped"], told["resident"]) <= told["limit"] // 2, "files of some KB: it leaks"
    outcomes = told["outcomes"]
    assert sum(outcomes.values()) == CASES
    assert min(outcomes.get(what, 0) for what in ("refused", "imported", "text only")) >= CASES // 50


def test_files_that_ask_for_all_the_memory(tmp_path: Path) -> None:
    told = run(tmp_path, "bombs", 0)
    assert told["outcomes"] == {"imported": 1, "refused": 9}
    reasons = ("states unfold to", "turns unfold to", "not a JSON object", "no metadata", "recursion", "written_by")
    for reason in (*reasons, "larger"):
        assert re.search(reason, told["said"]), f"none was refused because {reason}"
