"""A campaign against machines that share a remote in PostgreSQL: kills and other disturbances, all counted.

    benchmarks/remote_campaign.py [--kills N] [--server-kills M] [--seconds S] [--seed SEED] [--folder DIR]

A round is 2 or 4 daemons in network namespaces, a server that they reach over TLS, a folder of packs, and clients that
talk to any daemon. Half of the daemons acknowledge as `remote`. One has a clock that is 11 minutes off. Of a request
with an Idempotency-Key a client tries again at another daemon. Each fourth round has PgBouncer before the server. The
disturbances of a round follow from the seed; the moments that they meet do not.

After a round the outboxes are emptied. Then each turn that a client was told is stored must be in the remote once, and
in the store of the daemon that answered, with the text as told. An undisturbed daemon without a remote answers the
same conversations. Its tokens, log probabilities and states must be those of the daemons, to the last bit. A round
prints its counts. The program exits with 1 if something is lost or wrong. It needs root, iproute2 and libfaketime.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from campaign_checks import Check
from campaign_clients import Client, Reach
from campaign_disturbances import Disturber
from cluster import missing
from conftest import opened
from daemon_process import DaemonProcess, conditions
from namespaces import MachineDaemon, Network, tls_cluster, tls_url
from pooler import Pooler
from talkers import plain_bias

from ssmd.model.artifact import Artifact

MODELS = ("mamba-f32", "granite-f32", "llama-f32", "bamba-last-f32")
CLIENTS = 12
ROUND = 50  # kills of daemons
OFF_S = 660  # of a machine's clock
END_S = 240.0  # s in which what waits must have been sent
ROWS = (
    *("kills of a daemon", "in a stream", "in a commit", "at start-up", "at any moment"),
    *("kills of the server", "links cut", "lids closed for 30 s", "packs lost", "remotes restored from a backup"),
    "remote late or away, by a log",
    *("requests", "died", "refused", "retried", "first answers again", "second branches", "of these unexplained"),
    *("turns told", "told `sent`", "told `waiting`", "went on at another daemon", "found", "lost", "twice"),
    *(
        "answers as the control's",
        "to the last bit",
        "of another cut",
        "near ties",
        "of other tokens of the same text",
        "states compared",
    ),
    *("states to the last bit", "states of another cut", "turns in the remote", "states in the remote"),
    "sessions a new machine took",
)
Outcome = tuple[Counter[str], list[str]]


class Round:
    """A round: machines, a server, clients and disturbances. counts, failures: its results."""

    def __init__(self, number: int, seed: str, kills: int, server_kills: int, folder: Path) -> None:
        self.number, self.seed, self.folder = number, f"{seed}:{number}", folder
        self.rng = random.Random(self.seed)
        self.kills, self.server_kills = kills, server_kills
        self.model = MODELS[number % len(MODELS)]
        self.names: tuple[str, ...] = ("a", "b") if number % 2 == 0 else ("a", "b", "c", "d")
        self.pooled = number % 4 == 3
        self.counts = Counter[str](dict.fromkeys(ROWS, 0))
        self.failures: list[str] = []

    @property
    def title(self) -> str:
        pooled = ", PgBouncer" if self.pooled else ""
        return f"round {self.number}: seed {self.seed!r}, {self.model}, {len(self.names)} daemons{pooled}"

    def run(self) -> None:
        artifact = opened()[self.model]
        packs = self.folder / "packs"
        packs.mkdir(mode=0o700)
        with contextlib.ExitStack() as held:
            network = held.enter_context(Network(self.names))
            cluster = tls_cluster(network)
            held.callback(cluster.close)
            database = cluster.database()
            port = None
            if self.pooled:
                pooler = held.enter_context(Pooler(cluster, connections=10, address=network.address))
                port = pooler.port
            url = tls_url(network, cluster, database, port, packs=str(packs))
            daemons = {}
            for n, name in enumerate(self.names):
                ack, off = ("remote", "local")[n % 2], OFF_S * self.rng.choice((-1, 1)) if n == 1 else 0
                options = ("--threads", "1", "--remote", url)
                made = MachineDaemon(network, name, artifact, self.folder / name, *options, clock_s=off, SSMD_ACK=ack)
                held.callback(_end, made)
                made.start()
                daemons[name] = made
            manifest = Artifact.open(artifact).manifest
            reach = Reach(daemons)
            fields = {"model": manifest.name, "logit_bias": plain_bias(artifact), "max_tokens": 6, "temperature": 0}
            clients = [Client(n, self.seed, reach, fields, self.failures.append) for n in range(CLIENTS)]
            disturber = Disturber(self, daemons, network, cluster, database, packs, reach)
            threads = [threading.Thread(target=one.run, daemon=True) for one in clients]
            for thread in threads:
                thread.start()
            try:
                disturber.run()
            finally:
                reach.over = True
            for thread in threads:
                thread.join(150)
                if thread.is_alive():
                    self.failures.append("a client got no answer for 150 s after the last disturbance")
            for client in clients:
                self.counts.update(client.counts)
            if self.settle(daemons):
                with DaemonProcess(artifact, self.folder / "control", "--threads", "1") as control:
                    check = Check(self, cluster, database, packs, clients, reach)
                    check.remote()
                    check.answers(control.port)
                check.states()
        for name in self.names:
            if "Traceback" in (log := (self.folder / f"{name}.log").read_text()):
                self.failures.append(f"the log of {name}: {log[log.rindex('Traceback') :][:1500]}")

    def settle(self, daemons: dict[str, MachineDaemon]) -> bool:
        """Start all daemons anew, wait until the remote has all, and stop them."""
        for one in daemons.values():
            one.kill()
            one.start()
        deadline = time.monotonic() + END_S
        for name, one in daemons.items():
            while (found := one.get("/health")[1]["remote"]) != {"status": "ok", "waiting": 0}:
                if time.monotonic() > deadline:
                    self.failures.append(f"after {END_S:.0f} s {name} still says {found}")
                    break
                time.sleep(0.2)
        for name, one in daemons.items():
            if code := one.stop():
                self.failures.append(f"{name} ended with {code} at SIGTERM")
        return True


def _end(daemon: MachineDaemon) -> None:
    with contextlib.suppress(Exception):
        daemon.kill()


def apart(asked: argparse.Namespace, number: int, kills: int, server_kills: int) -> Outcome:
    """Run a round in a process of its own: one that crashes or hangs is a failure too."""
    folder = asked.folder / f"round-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, __file__, "--seed", asked.seed, "--folder", str(folder), "--only", str(number)]
    command += ["--kills", str(kills), "--server-kills", str(server_kills)]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            process.wait(1200)
        except subprocess.TimeoutExpired:
            pass
        finally:  # a stop of this program stops the round, which ends its daemons
            process.terminate()
            process.wait()
    try:
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    except (OSError, ValueError):
        said_last = (folder / "said").read_text(errors="replace")[-2000:]
        return Counter(), [f"round {number}: its process ended with {process.returncode}: {said_last}"]
    if not found["failures"]:
        shutil.rmtree(folder)
    return Counter(found["counts"]), found["failures"]


def only(asked: argparse.Namespace) -> None:
    """Run one round here."""
    one = Round(asked.only, asked.seed, asked.kills, asked.server_kills, asked.folder)
    began = time.monotonic()
    try:
        one.run()
    except Exception as err:
        one.failures.append(f"the round broke off: {type(err).__name__}: {err}")
    (asked.folder / "title").write_text(f"{one.title}; {time.monotonic() - began:.0f} s")
    (asked.folder / "found.json").write_text(json.dumps({"counts": one.counts, "failures": one.failures}, indent=1))


def table(counts: Counter[str]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {what} | {counts[what]:,} |" for what in ROWS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="SIGKILLs of daemons")
    parser.add_argument("--server-kills", type=int, default=2, help="SIGKILLs of the server")
    parser.add_argument("--seconds", type=float, default=3600, help="no round begins after that")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--folder", type=Path, help="keep data and logs of rounds that failed here")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if why := missing():
        raise SystemExit(why)
    if asked.only is not None:
        only(asked)
        return
    asked.folder = asked.folder or Path(tempfile.mkdtemp(prefix="ssmd-campaign-"))
    rounds = -(-asked.kills // ROUND)
    began, total, failures = time.monotonic(), Counter[str](), list[str]()
    print(f"# remote_campaign: seed {asked.seed!r}, {asked.kills} kills, {asked.server_kills} of the server")
    print(f"# {conditions()}; {asked.folder}", flush=True)
    for number in range(rounds):
        if time.monotonic() - began > asked.seconds:
            print(f"# {asked.seconds:.0f} s are over: {number} of {rounds} rounds were run")
            break
        kills = min(ROUND, asked.kills - number * ROUND)
        servers = asked.server_kills * (number + 1) // rounds - asked.server_kills * number // rounds
        started = time.monotonic()
        try:
            counts, wrong = apart(asked, number, kills, servers)
        except KeyboardInterrupt:
            print(f"# stopped in round {number + 1} of {rounds}, which is not counted")
            break
        total.update(counts)
        failures += wrong
        took = time.monotonic() - started
        print(f"\n# round {number + 1} of {rounds}: {MODELS[number % len(MODELS)]}, {took:.0f} s, {conditions()}")
        print(f"# this round: {json.dumps({what: counts[what] for what in ROWS if counts[what]})}")
        print(f"# failures: {len(wrong)}; of all rounds so far: {len(failures)}\n\n{table(total)}", flush=True)
        for failure in wrong:
            print(failure, file=sys.stderr, flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
