"""Twenty malformed artifacts a format: each is refused in one line, ends its own process, or computes what it should.

benchmarks/artifact_mutants.py has 300 a format.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from trials import CRASH, LOADED, MANIFEST_CHECK, TRIAL, outcomes

SEEDS = {
    "llama-f32": (1, 2, 4, 7, 8, 11, 13, 14, 18, 20, 22, 24, 27, 29, 33, 36, 37, 39, 43, 152),
    "openvino-llama-f32": (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 14, 16, 18, 19, 21, 25, 31, 35, 66),
    "wgpu-llama-int8": (*range(19), 165),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="each is loaded in a fork")
@pytest.mark.parametrize("name", SEEDS)
def test_mutants_end_in_one_error_or_compute_right(artifacts: TinyArtifacts, tmp_path: Path, name: str) -> None:
    done = list(outcomes(artifacts[name], tmp_path / "mutants", SEEDS[name]))
    assert [one.seed for one in done] == list(SEEDS[name])
    for one in done:
        assert one.end in (MANIFEST_CHECK, TRIAL, CRASH, LOADED), one
        assert bool(one.said) == (one.end != LOADED), one
        assert one.said.isprintable(), one
        assert one.mib < 1000, one
        if one.end == TRIAL:  # an error of ours, and not the last line of a library's
            assert one.said.startswith(("ssmd.", "ssmd_", "its logits are", "MemoryError")), one
            assert "Converting input model" not in one.said, one
    assert {MANIFEST_CHECK, TRIAL} < {one.end for one in done}
