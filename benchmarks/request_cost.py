"""The time of a request beside the model: from its first byte to the answer's last, less the model's computation.

    benchmarks/request_cost.py [MODEL]     an artifact's name or path; default: smollm2.
    benchmarks/request_cost.py --remote    stored plain requests alone: without a remote, with one, and with one whose
                                           folder is away, three times in turn.
    benchmarks/request_cost.py --before CHECKOUT
                                           the same of this checkout and of another one, as of an older commit.

One client, one request after the other, each answered in full. Less: the prompt's prefill, the restore of a state, and
the time between tokens, whose share that is not the model's overhead.py and structured.py tell. Before: until the
prompt is fed and from then to the first token; after: the rest, with the commit of what is stored, and all of HTTP. Of
each kind the first requests, which import, compile and warm up, are not counted. Goal: 3 ms at the 95th percentile.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from daemon_process import DaemonProcess, conditions

from ssmd.config import Settings
from ssmd.installed import resolve

FIRST = 5
Fields = dict[str, Any]
SCHEMA: Fields = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Lima"]}, "size": {"enum": ["small", "big"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOL: Fields = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
KINDS: dict[str, Fields] = {
    "plain": {},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}},
    "tools": {"tools": [TOOL]},
    "a forced call": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
}


def asked(connection: http.client.HTTPConnection, body: Fields) -> tuple[float, float]:
    """Send a request. Returns its ms beside the model: (before its first token, in all)."""
    raw = json.dumps(body)
    started = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", raw, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    took_ms = (time.perf_counter() - started) * 1e3
    if response.status != 200:
        raise RuntimeError(answer.decode())
    usage = json.loads(answer)["usage"]
    own = usage["ssmd"]
    before_ms = own["ttft_ms"] - own["prefill_ms"] - own["restore_ms"]
    decoded_ms = (own["tbt_ms"] or 0.0) * (usage["completion_tokens"] - 1)
    return before_ms, took_ms - own["prefill_ms"] - own["restore_ms"] - decoded_ms


def measured(daemon: DaemonProcess, requests: int, fields: Fields, first: int = 0) -> list[str]:
    """Send requests one after the other. Returns the cells of a row; first: number of the first one."""
    model = daemon.get("/v1/models")[1]["data"][0]["id"]
    found = []
    for i in range(first, first + FIRST + requests):
        content = f"How is the weather on day {i} in Bonn, and why?"
        body = {"model": model, "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": 24, "temperature": 0.8, "seed": i, **fields}
        connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
        found.append(asked(connection, body))
        connection.close()
    before, whole = np.array(found[FIRST:]).T
    cells = [*np.percentile(before, [50, 95]), *np.percentile(whole - before, [50, 95])]
    cells += np.percentile(whole, [50, 95]).tolist()
    return [f"{x:.1f}" for x in cells]


def in_turn(daemons: dict[str, DaemonProcess], head: str, requests: int) -> None:
    """Measure stored plain requests of daemons that run beside one another, three times in turn."""
    print(f"| {head} | before p50, ms | p95 | after p50, ms | p95 | in all p50, ms | p95 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    time.sleep(3)  # for the daemons' idle work
    for turn in range(3):
        for way, daemon in daemons.items():
            cells = measured(daemon, requests, {"store": True}, turn * (FIRST + requests))
            print(f"| {way} | {' | '.join(cells)} |", flush=True)


def with_a_remote(name: str, requests: int) -> None:
    artifact = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
    print(
        f"# request_cost --remote: {artifact.parent.name}, {artifact.name}; {conditions()}; {requests} requests each\n"
    )
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as held:
        daemons = {}
        for way in ("none", "a folder", "a folder that is away"):
            remote = Path(at) / way / "remote"
            remote.mkdir(mode=0o700, parents=True)
            options = () if way == "none" else ("--remote", str(remote))
            daemons[way] = held.enter_context(DaemonProcess(artifact, Path(at) / way / "data", *options))
            if way.endswith("away"):
                remote.rename(remote.with_name("away"))
        in_turn(daemons, "remote", requests)


def with_another(name: str, requests: int, checkout: Path) -> None:
    artifact = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
    print(
        f"# request_cost --before: {artifact.parent.name}, {artifact.name}; {conditions()}; {requests} requests each\n"
    )
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as held:
        daemons = {}
        for way, root in (("before", checkout.resolve()), ("now", Path(__file__).parents[1])):
            program = ("env", f"PYTHONPATH={root}:{root / 'runtimes'}", sys.executable, "-P", "-m", "ssmd")
            daemons[way] = held.enter_context(DaemonProcess(artifact, Path(at) / way / "data", program=program))
        in_turn(daemons, "commit", requests)


def main(name: str, requests: int) -> None:
    artifact = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
    print(
        f"# request_cost: {artifact.parent.name}, {artifact.name}; {conditions()}; {requests} requests of each kind\n"
    )
    print("| a request with | stored | before p50, ms | p95 | after p50, ms | p95 | in all p50, ms | p95 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as at, DaemonProcess(artifact, Path(at) / "data") as daemon:
        time.sleep(3)  # for the daemon's idle work
        for kind, fields in KINDS.items():
            for store in (False, True):
                cells = measured(daemon, requests, {**fields, "store": store})
                print(f"| {kind} | {'yes' if store else 'no'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--remote", action="store_true", help="compare requests with a remote and without one")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare requests with another checkout's")
    given = parser.parse_args()
    if given.before is not None:
        with_another(given.model, given.requests, given.before)
    else:
        (with_a_remote if given.remote else main)(given.model, given.requests)
