"""The bytes of a conversation's state by model: measured in the middle of a text, and computed for a long one.

    benchmarks/states.py MODEL… [--at 1000,8000] [--computed 100000]

MODEL: the name or folder of an artifact. Its program reads a text of so many tokens, and its state is saved as a
checkpoint has it: the sizes of all tensors are added. StateSpec must give the same number there, or the run ends with
an error; it also gives the last column. A cell is empty where the text is longer than the model's context.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from daemon_process import conditions

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program, get_runtime

AT, COMPUTED = (1000, 8000), 100_000  # tokens


def measured(program: Program, handle: Any, position: int) -> int:
    """Feed a handle up to `position` tokens, and return the bytes of its state. Raises RuntimeError for other bytes."""
    at = program.position(handle)
    for n in buckets.pieces(at, position, program.buckets):
        program.prefill(handle, [1 + i % 100 for i in range(at, at + n)])
        at += n
    found = sum(int(tensor.nbytes) for tensor in program.save(handle).tensors.values())
    if found != (expected := program.spec.nbytes_at(position)):
        raise RuntimeError(f"the state of {position} tokens has {found} bytes, and {expected} by StateSpec")
    return found


def main(artifacts: Sequence[Artifact], at: Sequence[int] = AT, computed: int = COMPUTED) -> None:
    print(conditions())
    heads = ("model", "family", "runtime", "recurrent", "a token more", *(f"at {n:,}" for n in at))
    print(f"\n| {' | '.join(heads)} | at {computed:,}, computed |\n|{' --- |' * (len(heads) + 1)}")
    for artifact in artifacts:
        m, fixed = artifact.manifest, artifact.manifest.spec.nbytes_at(0)
        cells = [m.name, m.family, m.runtime, f"{fixed:,}", f"{m.spec.nbytes_at(1) - fixed:,}"]
        with closing(get_runtime(m.runtime).load(artifact)) as program:
            handle = program.new_state()
            for n in sorted(at):
                fits = program.context is None or n <= program.context
                cells.append(f"{measured(program, handle, n):,}" if fits else "")
        print(f"| {' | '.join((*cells, f'{m.spec.nbytes_at(computed):,}'))} |", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--at", type=numbers, default=AT, help="tokens: 1000,8000")
    parser.add_argument("--computed", type=int, default=COMPUTED, help="tokens of the last column")
    given, settings = parser.parse_args(), Settings()
    folders = [
        Path(name) if Path(name).exists() else resolve(name, settings.models_dir, settings.runtime, settings.device)
        for name in given.models
    ]
    main([Artifact.open(folder) for folder in folders], given.at, given.computed)
