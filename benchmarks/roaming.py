"""One conversation on two machines and two runtimes: kills, a cut link, an offline branch on each, and their return.

    benchmarks/roaming.py turns [--model mamba] [--model granite]
    benchmarks/roaming.py rates MODEL [--tokens 1000,2000] [--samples N]

The machines are network namespaces; PostgreSQL listens on their bridge, with TLS. `turns` uses a tiny model of the
tests as LiteRT and as OpenVINO artifact. It prints each turn, checks what it states, and exits with 1 if that does not
hold. `rates` takes an artifact's folder or name. It measures the time to the first token at a machine that fetches a
state over a slow link (tc with tbf), and at one that reads the turns again. The packs come over that link too: sshfs
with its server, over plain TCP. It needs root, iproute2, and for `rates` sshfs and OpenSSH's sftp-server.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import socket
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cluster import Cluster
from conftest import opened
from daemon_process import conditions
from forked import DaemonProcess as ForkedProcess
from namespaces import MachineDaemon, Network, tls_cluster, tls_url
from talkers import CHAT, WORDS, ask, body_of, plain_bias, told_by

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.model.artifact import Artifact
from ssmd.sessions.remote.body import TurnBody

Messages = list[dict[str, str]]
WITHIN_S = 60.0  # s in which something must have happened
SFTP = Path("/usr/lib/openssh/sftp-server")
COLUMNS = ("turn", "machine", "runtime", "prompt tokens", "`cached_tokens`", "resume", "`usage.ssmd.remote`", "then")
LINKS = (1_000_000_000, 100_000_000)  # bits a second


class Checks:
    """Statements that must hold. failures: those that did not."""

    def __init__(self) -> None:
        self.made, self.failures = 0, list[str]()

    def that(self, holds: bool, what: str) -> None:
        self.made += 1
        if not holds:
            self.failures.append(what)


def until(condition: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"within {within_s:.0f} s it did not happen that {what}")
        time.sleep(0.05)


class Conversation:
    """A conversation that moves. said: its messages as its client has them."""

    def __init__(self, model: str, bias: dict[str, float], checks: Checks, seed: str) -> None:
        self.model, self.checks, self.rng = model, checks, random.Random(seed)
        self.fields = {"temperature": 0, "max_tokens": 8, "logit_bias": bias, "stream": False}
        self.said: Messages = []
        self.session = ""
        self.told: list[tuple[str, str, Messages]] = []  # question, answer, and the messages that were sent
        self._asked = 0

    def question(self) -> str:
        self._asked += 1
        return f"q{self._asked} {' '.join(self.rng.choices(WORDS, k=5))}"

    def say(
        self, at: MachineDaemon, turn: str, expected: Sequence[str], sent: str, then: str = "", text: str | None = None
    ) -> None:
        """Ask a question, print the turn's row, and check it. expected: values of `resume`."""
        question = self.question() if text is None else text
        messages = [*self.said, {"role": "user", "content": question}]
        with at.network.inside(at.name):
            got = ask(at.port, "POST", CHAT, body_of(self.model, messages, self.fields))
        self.checks.that(got.status == 200, f"turn {turn} is answered: {got.status} {got.body[:300]!r}")
        told, own = told_by(got.body, False), got.json["usage"]["ssmd"]
        runtime = at.get("/health")[1]["runtime"]
        cells = (turn, at.name.upper(), runtime, told.prompt, told.cached, told.resume, own["remote"], then)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        self.checks.that(told.stored, f"turn {turn} is stored")
        self.checks.that(told.resume in expected, f"turn {turn} resumes {expected}, not {told.resume!r}")
        self.checks.that((told.cached > 0) == (told.resume != "none"), f"turn {turn}: {told.cached} cached tokens")
        self.checks.that(own["remote"] == sent, f"turn {turn} says {sent!r}, not {own['remote']!r}")
        self.checks.that(told.session == (self.session or told.session), f"turn {turn} is in session {self.session}")
        self.session = told.session
        self.said = [*messages, {"role": "assistant", "content": told.text}]
        self.told.append((question, told.text, messages))

    def broken_off(self, at: MachineDaemon, turn: str) -> str:
        """Ask a question, and kill the daemon in its stream. Returns the question."""
        question = self.question()
        body = {**self.fields, "model": self.model, "max_tokens": 150, "stream": True}
        body["messages"] = [*self.said, {"role": "user", "content": question}]
        with at.network.inside(at.name):
            connection = http.client.HTTPConnection("127.0.0.1", at.port, timeout=60)
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        with contextlib.closing(connection):
            response = connection.getresponse()
            first = response.readline()
            at.kill()
            rest = b""
            with contextlib.suppress(OSError, http.client.HTTPException):
                rest = response.read()
        self.checks.that(b"data" in first and b"[DONE]" not in rest, f"turn {turn} was cut off in its stream")
        print(f"| {turn} | {at.name.upper()} | | | | | | `kill -9` in its stream |", flush=True)
        return question


def turns(variant: str) -> list[str]:
    """Let a conversation roam. Returns what did not hold."""
    checks = Checks()
    here, there = opened()[f"{variant}-f32"], opened()[f"openvino-{variant}-f32"]
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        network = held.enter_context(Network(("a", "b")))
        cluster = tls_cluster(network)
        held.callback(cluster.close)
        database = cluster.database()
        (folder / "packs").mkdir(mode=0o700)
        url = tls_url(network, cluster, database, packs=str(folder / "packs"))
        made = {
            name: MachineDaemon(network, name, artifact, folder / name, "--remote", url, SSMD_ACK="remote")
            for name, artifact in (("a", here), ("b", there))
        }
        a, b = made["a"], made["b"]
        for one in (a, b):
            held.callback(_end, one)
            one.start()
        talk = Conversation(Artifact.open(here).manifest.name, plain_bias(here), checks, variant)
        print(f"\n`{variant}`: {conditions()}\n\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
        _roam(talk, a, b, cluster, database)
        _return(talk, a, b, cluster, database, url)
        for one in (a, b):
            _sent(one)
        _compare(talk, cluster, database)
        checks.that(a.stop() == 0 and b.stop() == 0, "both daemons end by themselves")
        _as_control(talk, here, folder)
    print(f"\n{checks.made} checks, {len(checks.failures)} failed.")
    return [f"{variant}: {one}" for one in checks.failures]


def _end(daemon: MachineDaemon) -> None:
    with contextlib.suppress(Exception):
        daemon.kill()


def _sent(daemon: MachineDaemon) -> None:
    """Wait until a daemon has sent all turns."""
    well = {"status": "ok", "waiting": 0}
    until(lambda: daemon.get("/health")[1]["remote"] == well, f"{daemon.name} has sent all")


def _rested(talk: Conversation, cluster: Cluster, database: str) -> None:
    """Wait until the remote has the state of the conversation's newest turn."""
    newest = f"SELECT turn, body FROM ssmd.turn WHERE session = '{talk.session}'"
    question = talk.told[-1][0]

    def there() -> bool:
        rows = cluster.admin(newest, database)
        [name] = [turn for turn, body in rows if _asked(bytes(body)) == question] or [None]
        return bool(cluster.admin(f"SELECT 1 FROM ssmd.ending WHERE turn = '{name}'", database))

    until(there, "the remote has the state of the last turn")


def _asked(body: bytes) -> str:
    given, _ = TurnBody.model_validate_json(body).turn.said
    return [message.content for message in given if message.role == "user"][-1]


def _roam(talk: Conversation, a: MachineDaemon, b: MachineDaemon, cluster: Cluster, database: str) -> None:
    """Let each machine go on after the other one was killed, after its answer or in it."""
    killed = "state sent, `kill -9`"
    talk.say(a, "1", ("none",), "sent", killed)
    for turn, here, there in (("2", a, b), ("3", b, a)):
        _rested(talk, cluster, database)
        here.kill()
        talk.say(there, turn, ("portable",), "sent", killed if turn == "2" else "state sent")
        here.start()
    _rested(talk, cluster, database)
    for turn, here, there in (("4", a, b), ("5", b, a)):
        question = talk.broken_off(here, turn)
        talk.say(there, turn, ("portable",), "sent", "state sent", text=question)
        here.start()
        _rested(talk, cluster, database)


def _return(talk: Conversation, a: MachineDaemon, b: MachineDaemon, cluster: Cluster, database: str, url: str) -> None:
    """Cut both links, let each machine make a branch, and let each go on with the other's branch after that."""
    talk.say(b, "6", ("portable",), "sent", "state sent, `ssmd session pull` at A")
    _rested(talk, cluster, database)
    done = a.command("session", "pull", talk.session, "--remote", url)
    talk.checks.that(done.returncode == 0, f"a pull at A works: {done.stdout} {done.stderr}")
    for one in (a, b):
        one.network.cut(one.name)
    common, branches = talk.said, dict[str, Messages]()
    for one in (a, b):
        talk.said = common
        talk.say(one, f"7{one.name}", ("exact", "portable"), "waiting", "link cut")
        talk.say(one, f"8{one.name}", ("exact", "portable"), "waiting", "link cut")
        branches[one.name] = talk.said
    for one in (a, b):
        one.network.mend(one.name)
    for one in (a, b):
        _sent(one)
    time.sleep(35)  # a machine that met no remote does not ask for 30 s; meanwhile both states are sent
    for one, other in ((a, "b"), (b, "a")):
        talk.said = branches[other]
        talk.say(one, f"9{one.name}", ("portable",), "sent", f"back; goes on with {other.upper()}'s branch")


def _compare(talk: Conversation, cluster: Cluster, database: str) -> None:
    """Check that the remote has each turn once, as it was told."""
    found = []
    for session, body in cluster.admin("SELECT session, body FROM ssmd.turn", database):
        _, [answered] = TurnBody.model_validate_json(bytes(body)).turn.said
        found.append((session, _asked(bytes(body)), answered.content))
    told = [(talk.session, question, answer) for question, answer, _ in talk.told]
    same = sorted(found) == sorted(told)
    talk.checks.that(same, f"the remote has the {len(told)} turns that were told, once: {found}, not {told}")


def _as_control(talk: Conversation, artifact: Path, folder: Path) -> None:
    """Check that one undisturbed daemon gives the same answers."""
    with ForkedProcess(artifact, folder / "control") as control:
        for question, answer, messages in talk.told:
            got = told_by(ask(control.port, "POST", CHAT, body_of(talk.model, messages, talk.fields)).body, False)
            talk.checks.that(got.text == answer, f"{question!r} is answered {answer!r}, by the control {got.text!r}")


class _Sftp(socketserver.ThreadingTCPServer):
    """An SFTP server of one folder's computer, over plain TCP: sshfs reads and writes as over a network."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _SftpConnection)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _SftpConnection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        subprocess.run([str(SFTP)], stdin=self.request, stdout=self.request, check=False)


@contextlib.contextmanager
def mounted(network: Network, name: str, source: Path, at: Path) -> Iterator[Path]:
    """Mount a folder over a machine's link."""
    at.mkdir(mode=0o700)
    with _Sftp(network.address) as server:
        port = server.server_address[1]
        options = ["-o", f"directport={port}", "-o", "nodev,nosuid,cache=no"]
        inside = ["nsenter", f"--net=/run/netns/{network.space(name)}"]
        subprocess.run([*inside, "sshfs", f"{network.address}:{source}", str(at), *options], check=True)
        try:
            yield at
        finally:
            subprocess.run(["umount", "-l", str(at)], check=False)
            server.shutdown()


def rates(artifact: Path, lengths: Sequence[int], samples: int) -> list[str]:
    """Measure TTFT with a fetched state, and with turns that are read again. Returns what did not hold."""
    checks, quick = Checks(), "\nfrom ssmd.sessions.remote import link; link.REST_S = 0.2"
    sure = quick + "; link.ASK_S = link.LEAST_S = 30.0; link.fetching_is_sooner = lambda *a: True"
    name = Artifact.open(artifact).manifest.name
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        network = held.enter_context(Network(("a", "b", "c")))
        cluster = tls_cluster(network)
        held.callback(cluster.close)
        database = cluster.database()
        (folder / "packs").mkdir(mode=0o700)
        far = held.enter_context(mounted(network, "b", folder / "packs", folder / "far"))
        packs = {"a": folder / "packs", "b": far}  # c takes no states: it reads
        daemons = {}
        for machine in network.names:
            given = {"packs": str(packs[machine])} if machine in packs else {}
            url = tls_url(network, cluster, database, None, **given)
            made = MachineDaemon(network, machine, artifact, folder / machine, "--remote", url, SSMD_ACK="remote")
            made.before += sure if machine == "b" else quick + "; link.ASK_S = 30.0"
            held.callback(_end, made)
            made.start()
            daemons[machine] = made
        print(f"\n`{name}`: {conditions()}; medians of {samples}, s until the first token; bytes of a pack\n")
        print("| tokens | bytes | link | fetching | reading again |\n| --- | --- | --- | --- | --- |")
        for link in LINKS:
            for machine in ("b", "c"):
                network.shape(machine, link)
            for length in lengths:
                took: dict[str, list[float]] = {"b": [], "c": []}
                prompts, before = set[int](), set((folder / "packs").glob("packs/*/*"))
                for n in range(-1, samples):
                    talk = _long(name, length, f"{link} {length} {n}", daemons["a"], cluster, database)
                    for machine in random.Random(n).sample(("b", "c"), 2):
                        ttft, told = _first_token(daemons[machine], name, talk)
                        fetched = told.cached > told.prompt / 2
                        checks.that(fetched == (machine == "b"), f"{machine} resumes {told.resume} at {told.cached}")
                        if n >= 0:
                            took[machine].append(ttft)
                            prompts.add(told.prompt)
                sizes = [p.stat().st_size for p in (folder / "packs").glob("packs/*/*") if p not in before]
                fetching, reading = (statistics.median(took[m]) for m in ("b", "c"))
                cells = (
                    f"{statistics.median(prompts):,.0f}",
                    f"{statistics.median(sizes) / 1e6:.1f} MB",
                    f"{link / 1e6:,.0f} Mbit/s",
                )
                print(f"| {' | '.join(cells)} | {fetching:.2f} | {reading:.2f} |", flush=True)
        for one in daemons.values():
            one.stop()
    print(f"\n{checks.made} checks, {len(checks.failures)} failed.")
    return checks.failures


def _long(name: str, length: int, seed: str, at: MachineDaemon, cluster: Cluster, database: str) -> Messages:
    """Begin a conversation of about so many tokens, and wait until the remote has its state."""
    rng = random.Random(seed)
    said = [{"role": "user", "content": f"{seed}: " + " ".join(rng.choices(WORDS[:-1], k=length))}]
    before = cluster.admin("SELECT count(*) FROM ssmd.ending", database)
    answer = at.post(CHAT, {"model": name, "messages": said, "max_tokens": 2, "temperature": 0})
    until(lambda: cluster.admin("SELECT count(*) FROM ssmd.ending", database) > before, "the state is sent")
    text = answer["choices"][0]["message"]["content"]
    return [*said, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]


def _first_token(at: MachineDaemon, name: str, said: Messages) -> tuple[float, Any]:
    """Return the seconds until the first token, and the answer."""
    body = {"temperature": 0, "max_tokens": 1, "stream": False}
    with at.network.inside(at.name):
        got = ask(at.port, "POST", CHAT, body_of(name, said, body))
    return got.json["usage"]["ssmd"]["ttft_ms"] / 1e3, told_by(got.body, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    show = parts.add_parser("turns")
    show.add_argument("--model", action="append", help="of tests/tiny.py; default: mamba and granite")
    speed = parts.add_parser("rates")
    speed.add_argument("model")
    speed.add_argument("--tokens", default="1000,2000")
    speed.add_argument("--samples", type=int, default=5)
    asked = parser.parse_args()
    failures: list[str] = []
    if asked.part == "turns":
        for variant in asked.model or ("mamba", "granite"):
            failures += turns(variant)
    else:
        path = Path(asked.model)
        artifact = path if path.is_dir() else resolve(asked.model, Settings().models_dir)
        failures += rates(artifact, [int(n) for n in asked.tokens.split(",")], asked.samples)
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
