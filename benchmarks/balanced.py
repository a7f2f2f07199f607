"""Four daemons of one remote behind HAProxy, each of which is restarted in turn while clients talk: all is counted.

    benchmarks/balanced.py [--rounds N] [--kill] [--model NAME] [--folder DIR]

PostgreSQL, HAProxy with docker/haproxy.cfg and the daemons are real; the model is a tiny one of the tests. A round
restarts each daemon once, with SIGTERM, or with --kill by SIGKILL. Answers wait for the remote (SSMD_ACK=remote). At
the end each answer that a client was told is stored must be in the remote once, and a new machine must get all
conversations. Exits with 1 if an answer is missing, or without --kill if a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conftest import opened
from daemon_process import conditions, free_port
from forked import DaemonProcess
from roamers import Client, Episode

CONFIGURATION = Path(__file__).parents[1] / "docker" / "haproxy.cfg"
CLIENTS = 8
APART_S = 1.5  # between two restarts
ROWS = {  # as printed; in roamers' words
    "restarts": "kills",
    "answers": "answers",
    "requests that failed": "requests that died",
    "requests that were refused": "refused",
    "answers that were told to be stored": "told that it was stored",
    "of these in the remote once": "questions found once",
    "went on in their session": "went on in its session",
    "began another session": "began another session",
    "sessions that a new machine took": "sessions a new machine took",
}


class Balancer:
    """HAProxy before some daemons, with the configuration that docs/scaling.md shows."""

    def __init__(self, ports: dict[str, int], folder: Path) -> None:
        """ports: of the daemons, by name."""
        program = shutil.which("haproxy") or "/usr/sbin/haproxy"
        self.port = free_port()
        text = CONFIGURATION.read_text().replace('"${LISTEN}"', f"127.0.0.1:{self.port}")
        servers = "".join(f"    server {name} 127.0.0.1:{port}\n" for name, port in ports.items())
        text = re.sub(r"    server a .*\n    server b .*\n", servers, text)
        assert text.count("    server ") == len(ports)
        file = folder / "haproxy.cfg"
        file.write_text(text)
        with (folder / "haproxy.log").open("ab") as log:
            self.process = subprocess.Popen([program, "-db", "-f", str(file)], stdout=log, stderr=log)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class RestartEpisode(Episode):
    """Four daemons, a balancer, its clients, and restarts of the daemons one after the other."""

    names = ("a", "b", "c", "d")

    def __init__(self, artifact: Path, rounds: int, folder: Path, *, kill: bool) -> None:
        super().__init__(artifact, "1", rounds * len(self.names), folder)
        self.kill = kill
        self.refusals = (503, 502) if kill else (503,)  # 502: the daemon that had begun is gone
        self.clients = [Client(n, "1", self) for n in range(CLIENTS)]
        self.seconds: list[float] = []  # of each stop
        self.balancer = Balancer({name: one.port for name, one in zip(self.names, self.daemons, strict=True)}, folder)
        self.places = [self.balancer]

    def life(self, *, server: bool) -> None:
        """Restart the next daemon."""
        time.sleep(APART_S)
        victim: DaemonProcess = self.daemons[self.counts["kills"] % len(self.daemons)]
        self.counts["kills"] += 1
        began = time.monotonic()
        if self.kill:
            victim.kill()
        elif (code := victim.stop(60)) != 0:
            self.failures.append(f"a daemon ended with {code} at SIGTERM")
        self.seconds.append(time.monotonic() - began)
        victim.start()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.balancer.close()


@contextlib.contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    if named is not None:
        named.mkdir(parents=True)
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="ssmd-balanced-") as made:
        yield Path(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--model", default="mamba-f32")
    parser.add_argument("--folder", type=Path, help="keep data and logs here")
    asked = parser.parse_args()
    os.environ |= {"SSMD_ACK": "remote", "SSMD_DRAIN": "30s"}
    with _folder(asked.folder) as folder:
        one = RestartEpisode(opened()[asked.model], asked.rounds, folder, kill=asked.kill)
        began = time.monotonic()
        one.run()
        print(f"# balanced{' --kill' if asked.kill else ''}: {asked.model}, {conditions()}")
        print(f"# {time.monotonic() - began:.0f} s, {CLIENTS} clients; a stop took {max(one.seconds):.1f} s at most\n")
        print("| | |\n| --- | --- |")
        for what, name in ROWS.items():
            print(f"| {what} | {one.counts[name]:,} |")
    for failure in one.failures:
        print(failure, file=sys.stderr)
    lost = one.counts["requests that died"] + one.counts["refused"]
    sys.exit(bool(one.failures or (lost and not asked.kill)))


if __name__ == "__main__":
    main()
