"""A process of its own that restores a saved state and makes the calls of `continue_from`: see test_resume.py.

usage: python continuation.py RUNTIME DEVICE ARTIFACT THREADS STATE.npz LOGITS.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from evaluated import runtime_of
from numpy.typing import NDArray

from ssmd.model.artifact import Artifact
from ssmd.model.state import State
from ssmd.runtime.protocol import Handle, Program


def continue_from(program: Program, handle: Handle, ids: list[int]) -> dict[str, NDArray[Any]]:
    """Decode, a padded prefill, a whole bucket, decode: everything a conversation does."""
    results = [program.decode([handle], [i])[0] for i in ids[:5]]
    results += [program.prefill(handle, ids[5:25]), program.prefill(handle, ids[25:89])]
    results += [program.decode([handle], [i])[0] for i in ids[89:]]
    state = program.save(handle)
    return {"logits": np.stack(results), **{n: np.ascontiguousarray(a) for n, a in state.tensors.items()}}


def main(runtime: str, device: str, artifact: str, threads: str, state_file: str, out: str) -> None:
    program = runtime_of(runtime).load(Artifact.open(Path(artifact)), device=device, threads=int(threads))
    with np.load(state_file) as saved:
        tensors = {n: saved[n] for n in saved.files if n not in ("position", "ids")}
        handle = program.restore(State(int(saved["position"]), 0, tensors))
        np.savez(out, allow_pickle=False, **continue_from(program, handle, saved["ids"].tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
