"""OpenVINO GenAI with optimum-intel's export of a model: a prompt's time to first token, and a step's.

    python benchmarks/true_shape.py qwen3.5-0.8b-text CHECKPOINT
    optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past --weight-format int8 FOLDER
    python benchmarks/genai.py FOLDER [--depths 64,512] [--rounds 3] [--threads 2]

It has an environment of its own: optimum-intel[openvino]==2.2.0, openvino-genai==2026.4.1.0, transformers==5.2.*. The
first round warms up and does not count. ssmd's artifact of the same shape: decode.py, with as many threads.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 24  # after the first token


def main(folder: Path, depths: list[int], rounds: int, threads: int) -> None:
    openvino: Any = importlib.import_module("openvino")
    genai: Any = importlib.import_module("openvino_genai")
    began = time.monotonic()
    pipeline = genai.LLMPipeline(str(folder), "CPU", INFERENCE_NUM_THREADS=threads)
    print(f"# OpenVINO GenAI {genai.__version__}, {folder.name}, {threads} threads, load {os.getloadavg()[0]:.2f}")
    print(f"# loaded in {time.monotonic() - began:.1f} s\n\n| tokens | prompt, ms | a step after it, ms |")
    print("| --- | --- | --- |")
    asked = genai.GenerationConfig()
    asked.ignore_eos, asked.do_sample, asked.max_new_tokens = True, False, 1 + STEPS
    rng = np.random.default_rng(0)
    for depth in depths:
        prompts, steps = list[float](), list[float]()
        for _ in range(1 + rounds):
            ids = rng.integers(10, 40_000, (1, depth), np.int64)
            told = pipeline.generate(openvino.Tensor(ids), asked).perf_metrics
            prompts.append(told.get_ttft().mean)
            steps.append(told.get_tpot().mean)
        print(f"| {depth} | {statistics.median(prompts[1:]):.0f} | {statistics.median(steps[1:]):.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--depths", type=lambda text: [int(n) for n in text.split(",")], default=[64, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    main(given.folder, given.depths, given.rounds, given.threads)
