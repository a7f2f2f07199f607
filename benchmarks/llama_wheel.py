"""llama.cpp's server from the wheel xllamacpp, with the options of `llama-server` that llama_server.py gives.

    PYTHON benchmarks/llama_wheel.py --model FILE.gguf --host 127.0.0.1 --port N --ctx-size N …

PYTHON: an interpreter that has the wheel (`pip install xllamacpp`), which need not be ssmd's. Whatever is not given is
llama-server's default: its prompt cache in memory (8 GiB) and its checkpoints of a context (32) are on.
"""

from __future__ import annotations

import argparse
import threading
from importlib.metadata import version

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    for name in ("port", "ctx-size", "parallel", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--slot-save-path", default="")
    parser.add_argument("--checkpoint-min-step", type=int, help="tokens between checkpoints of a context, else its own")
    asked = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = asked.model, [asked.host], asked.port
    params.n_ctx, params.n_parallel, params.slot_save_path = asked.ctx_size, asked.parallel, asked.slot_save_path
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    params.fit_params, params.model_alias = False, {f"xllamacpp {version('xllamacpp')}"}
    if asked.checkpoint_min_step is not None:
        params.checkpoint_min_step = asked.checkpoint_min_step
    server = xllamacpp.Server(params)
    print(f"xllamacpp {version('xllamacpp')} at {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
