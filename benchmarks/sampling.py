"""Microseconds to sample one token: medians over many draws, for peaked and flat logits."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

import numpy as np
from numpy.typing import NDArray

from ssmd.engine.sampling.params import Dry, SamplingParams
from ssmd.engine.sampling.sampler import Sampler

LIMIT_US = 300.0

SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(seed=0),
    "top_p=0.9": SamplingParams(top_p=0.9, seed=0),
    "top_p=0.5": SamplingParams(top_p=0.5, seed=0),
    "top_k=40": SamplingParams(top_k=40, seed=0),
    "top_k=40, top_p=0.9": SamplingParams(top_k=40, top_p=0.9, seed=0),
    "temperature=0.7, top_p=0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=0),
    "top_p=0.9, logit_bias": SamplingParams(top_p=0.9, logit_bias={5: -100.0, 99: 2.0}, seed=0),
    "min_p=0.05": SamplingParams(min_p=0.05, seed=0),
    "top_p=0.9, min_p=0.05": SamplingParams(top_p=0.9, min_p=0.05, seed=0),
    "top_p=0.9, penalty of the last 64": SamplingParams(top_p=0.9, repetition_penalty=1.1, seed=0),
    "top_p=0.9, penalty of 8192": SamplingParams(top_p=0.9, repetition_penalty=1.1, repeat_last_n=-1, seed=0),
    "greedy, penalty of the last 64": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "top_p=0.9, frequency and presence": SamplingParams(top_p=0.9, frequency_penalty=0.1, presence_penalty=0.1, seed=0),
    "typical_p=0.9": SamplingParams(typical_p=0.9, seed=0),
    "typical_p=0.9, top_p=0.9": SamplingParams(typical_p=0.9, top_p=0.9, seed=0),
    "min_p=0.05, XTC": SamplingParams(min_p=0.05, xtc_probability=0.5, seed=0),
    "top_p=0.9, DRY over 8192": SamplingParams(top_p=0.9, dry=Dry(0.8), seed=0),
    "top_p=0.9, logprobs, top_logprobs=20": SamplingParams(top_p=0.9, logprobs=True, top_logprobs=20, seed=0),
}


def logits_of(shape: str, vocabulary: int) -> NDArray[np.float32]:
    random = np.random.default_rng(0)
    logits = random.normal(0.0, 2.5 if shape == "peaked" else 1.0, vocabulary)
    if shape == "peaked":  # as a trained model's: one likely token, a tail of alternatives
        logits[random.choice(vocabulary, 200, replace=False)] += np.linspace(4.0, 14.0, 200)
    if shape == "constant":
        logits[:] = 0.0
    return logits.astype(np.float32)


def median_us(sampler: Sampler, logits: NDArray[np.float32], draws: int) -> tuple[float, float]:
    """Return the median and 95th percentile of one sample."""
    times = []
    for _ in range(draws):
        start = time.perf_counter_ns()
        sampler.sample(logits)
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times), sorted(times)[int(len(times) * 0.95)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=100_352)
    parser.add_argument("--draws", type=int, default=500)
    args = parser.parse_args()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(
        f"vocabulary {args.vocabulary}, float32, {args.draws} draws each, one thread; "
        f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, numpy {np.__version__}"
    )
    print(f"{'settings':40} {'logits':9} {'median µs':>10} {'p95 µs':>10}")
    before = np.random.default_rng(1).integers(0, args.vocabulary, 8192)  # of a prompt: counted by a penalty alone
    slowest = 0.0
    for name, params in SETTINGS.items():
        for shape in ("peaked", "flat", "constant"):
            logits = logits_of(shape, args.vocabulary)
            sampler = Sampler(params, before=before)
            sampler.sample(logits)
            median, p95 = median_us(sampler, logits, args.draws)
            slowest = max(slowest, 0.0 if params.logprobs else median)
            print(f"{name:40} {shape:9} {median:10.0f} {p95:10.0f}")
    print(f"slowest median without logprobs: {slowest:.0f} µs (limit {LIMIT_US:.0f})")


if __name__ == "__main__":
    main()
