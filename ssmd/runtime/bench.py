"""The speed of an artifact on this machine: load, prefill, decode, save and restore, beside one read of its weights.

docs/notes/benchmarks.md describes the measurements. All of them go through the interface of a Runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from ssmd.machine import processor
from ssmd.machine.memory import most_resident, resident, return_big_blocks, trim
from ssmd.model.artifact import REQUIRED, Artifact, Manifest
from ssmd.model.state import State, StateSpec
from ssmd.runtime.protocol import FormTime, Handle, Program, Runtime, form_times
from ssmd.runtime.weightread import WeightRead

STREAMS = (4, 8)  # numbers of streams that are decoded together
STEPS = 20  # decode steps of a round, after one that does not count
READS = 4  # reads of the weights in a round, after one that does not count
MOST_POSITION = 1 << 30  # a graph counts tokens in 32 bits
_NOT_WEIGHTS = (*REQUIRED, "chat_template.jinja")

Progress = Callable[[int, int], None]  # rounds done, rounds in all


class BenchError(ValueError):
    """A measurement that is not possible with this artifact; the message says which would be."""


@dataclass(frozen=True)
class Prefill:
    """The time of a prefill that fills its bucket. `ms`: the median."""

    bucket: int
    ms: float

    @property
    def tokens_per_s(self) -> float:
        return self.bucket / self.ms * 1e3


@dataclass(frozen=True)
class BatchedDecode:
    """The time of a decode step of several streams. `ms`: the median."""

    streams: int
    ms: float

    @property
    def tokens_per_s(self) -> float:
        return self.streams / self.ms * 1e3


@dataclass(frozen=True)
class Report:
    """The results of a benchmark. Times are in ms, medians unless named otherwise. None: the system does not report it.

    load_again_ms: time of a second load, after the artifact was loaded and closed in this process. weights_read_ms:
    time to read `weights_bytes` of memory, with as many threads as compute a step.
    """

    producer: str
    threads: int
    cpu: str
    load_average: tuple[float, float, float] | None  # over 1, 5 and 15 minutes, before the benchmark
    position: int
    repeats: int
    load_first_ms: float
    load_again_ms: float
    prefill: tuple[Prefill, ...]
    decode_steps: int
    tbt_p50_ms: float
    tbt_p95_ms: float
    together: tuple[BatchedDecode, ...]
    save_ms: float
    restore_ms: float
    state_bytes: int  # size of the state at `position`, which save_ms and restore_ms are for
    fixed_bytes: int  # size of the state at position 0
    token_bytes: int  # growth of the state with each token
    weights_bytes: int
    weights_read_ms: float
    resident_bytes: int | None  # after the load
    most_resident_bytes: int | None  # peak up to the end of the first round, before the memory for reads is allocated
    resident_together_bytes: int | None  # while the most streams are decoded together
    form_times: tuple[FormTime, ...]  # by which the program chose its kernels on this device

    @property
    def decode_per_read(self) -> float:
        """A decode step's time in reads of the weights. It cannot be below 1 if a step needs all of them."""
        return self.tbt_p50_ms / self.weights_read_ms


def bench(
    artifact: Artifact,
    runtime: Runtime,
    *,
    device: str | None = None,
    threads: int | None = None,
    position: int = 0,
    repeats: int = 5,
    progress: Progress = lambda done, of: None,
) -> Report:
    """Load twice, then measure in rounds. Each round has all kinds of calls, so a disturbance affects all alike.

    position: tokens of history before a prefill and before the decode steps. Raises BenchError if the context has no
    room for them after that, and the errors of `load`.
    """
    manifest = artifact.manifest
    _check(manifest, position, repeats)
    load_average = processor.load_average()
    return_big_blocks()  # as a daemon does
    with _loaded(artifact, runtime, device, threads) as (_, load_first_ms):
        pass
    trim()
    with _loaded(artifact, runtime, device, threads) as (program, load_again_ms):
        resident_bytes = resident()
        rounds = _Rounds(program, position)
        progress(0, 1 + repeats)
        rounds.warm_up()
        most_resident_bytes = most_resident()
        with WeightRead(weights_bytes(manifest), program.threads) as read:
            for done in range(1, 1 + repeats):
                progress(done, 1 + repeats)
                rounds.go(read)
        took = rounds.took
        trim()
        together = tuple(BatchedDecode(streams, _median(rounds.together(streams))) for streams in STREAMS)
        resident_together_bytes = rounds.resident
        tbt_p50_ms, tbt_p95_ms = np.percentile(took.decode, [50, 95])
        return Report(
            producer=program.producer,
            threads=program.threads,
            cpu=processor.cpu_name(),
            load_average=load_average,
            position=position,
            repeats=repeats,
            load_first_ms=load_first_ms,
            load_again_ms=load_again_ms,
            prefill=tuple(Prefill(bucket, _median(times)) for bucket, times in took.prefill.items()),
            decode_steps=len(took.decode),
            tbt_p50_ms=float(tbt_p50_ms),
            tbt_p95_ms=float(tbt_p95_ms),
            together=together,
            save_ms=_median(took.save),
            restore_ms=_median(took.restore),
            state_bytes=program.spec.nbytes_at(position),
            fixed_bytes=program.spec.nbytes_at(0),
            token_bytes=program.spec.nbytes_at(1) - program.spec.nbytes_at(0),
            weights_bytes=weights_bytes(manifest),
            weights_read_ms=_median(took.read),
            resident_bytes=resident_bytes,
            most_resident_bytes=most_resident_bytes,
            resident_together_bytes=resident_together_bytes,
            form_times=form_times(program),
        )


def weights_bytes(manifest: Manifest) -> int:
    """Return the bytes of the files that hold an artifact's weights."""
    return sum(f.size for name, f in manifest.files.items() if name not in _NOT_WEIGHTS)


def _check(manifest: Manifest, position: int, repeats: int) -> None:
    if repeats < 1:
        raise BenchError(f"there must be at least one round, not {repeats}")
    if not 0 <= position <= MOST_POSITION:
        raise BenchError(f"a position is between 0 and {MOST_POSITION} tokens, not {position}")
    if manifest.context is None:
        return
    bucket, steps = manifest.buckets[-1], 1 + STEPS
    needed, what = max((bucket, f"a prefill of {bucket} tokens"), (steps, f"{steps} decode steps"))
    last = manifest.context - needed
    if position > last:
        advice = f"the last position that can be measured is {last}" if last >= 0 else "build it with a larger one"
        raise BenchError(
            f"{manifest.name} has a context of {manifest.context} tokens: there is no room for {what} after position "
            f"{position}; {advice}"
        )


@contextmanager
def _loaded(
    artifact: Artifact, runtime: Runtime, device: str | None, threads: int | None
) -> Iterator[tuple[Program, float]]:
    """Yield a loaded program, and the ms that its load took."""
    begin = time.perf_counter()
    program = runtime.load(artifact, device=device, threads=threads)
    try:
        yield program, _ms_since(begin)
    finally:
        program.close()


@dataclass
class _Timings:
    """Times in ms."""

    prefill: dict[int, list[float]]  # by bucket
    decode: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


class _Rounds:
    """Rounds of calls on one program.

    At most one handle is alive, as in a daemon that serves one conversation, except in steps of several streams.
    resident: resident bytes during the last of these steps.
    """

    def __init__(self, program: Program, position: int) -> None:
        self._program = program
        self._tokens = [7919 * i % program.vocabulary for i in range(max(*program.buckets, 1 + STEPS))]
        self._state = _saved(program, position)
        self.took = self._nothing()
        self.resident: int | None = None

    def warm_up(self) -> None:
        """Run a round that does not count."""
        self.go(None)
        self.took = self._nothing()

    def go(self, read: WeightRead | None) -> None:
        for bucket in self._program.buckets:
            self._prefill(bucket)
        self._save_and_restore()
        self._decode()
        if read is not None:
            self.took.read += [read.ms() for _ in range(1 + READS)][1:]

    def _prefill(self, bucket: int) -> None:
        with self._restored() as handle:
            begin = time.perf_counter()
            self._program.prefill(handle, self._tokens[:bucket])
            self.took.prefill[bucket].append(_ms_since(begin))

    def _save_and_restore(self) -> None:
        begin = time.perf_counter()
        with self._restored() as handle:
            self.took.restore.append(_ms_since(begin))
            begin = time.perf_counter()
            self._program.save(handle)
            self.took.save.append(_ms_since(begin))

    def _decode(self) -> None:
        with self._restored() as handle:
            times = []
            for token in self._tokens[: 1 + STEPS]:
                begin = time.perf_counter()
                self._program.decode([handle], [token])
                times.append(_ms_since(begin))
            self.took.decode += times[1:]

    def together(self, streams: int) -> list[float]:
        """Take steps of several streams that all stand at the position. Returns the time of each, ms."""
        batches = getattr(self._program, "batches", None)
        if batches is not None:
            batches.open(streams)  # as in a daemon after the first of them
        with ExitStack() as stack:
            handles = [stack.enter_context(self._restored()) for _ in range(streams)]
            times = []
            for token in self._tokens[: 1 + STEPS]:
                begin = time.perf_counter()
                self._program.decode(handles, [token] * streams)
                times.append(_ms_since(begin))
            self.resident = resident()
        return times[1:]

    @contextmanager
    def _restored(self) -> Iterator[Handle]:
        handle = self._program.restore(self._state)
        try:
            yield handle
        finally:
            self._program.release(handle)

    def _nothing(self) -> _Timings:
        return _Timings({bucket: [] for bucket in self._program.buckets})


def _saved(program: Program, position: int) -> State:
    """Return a state of zeros at `position`, in the layout of the program's own saves. Its contents cost no time."""
    spec: StateSpec = program.spec
    zeros = {t.name: np.zeros(t.shape_at(position), t.numpy_dtype) for t in spec.tensors}
    handle = program.restore(State(position, 0, zeros))
    try:
        return program.save(handle)
    finally:
        program.release(handle)


def _ms_since(begin: float) -> float:
    return (time.perf_counter() - begin) * 1e3


def _median(times: list[float]) -> float:
    return float(np.median(times))
