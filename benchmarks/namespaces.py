"""Machines in network namespaces of their own, on one bridge, as real machines on a network. It needs Linux and root.

A machine's link can be cut, so that packets are lost without a word, and made slow (tc with tbf).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import commands
from cluster import PASSWORD, Cluster
from daemon_process import SSMD
from forked import DaemonProcess

_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>
_HOME = Path("/proc/thread-self/ns/net")
CLOCK = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


def ip(*words: str) -> None:
    """Run `ip`. Raises RuntimeError with its words if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Network:
    """A bridge with an address of this computer, and a namespace for each machine. Several stand beside each other."""

    def __init__(self, names: Sequence[str]) -> None:
        if os.geteuid():
            raise SystemExit("network namespaces need root")
        self.names, self._tag = tuple(names), f"{os.getpid() % 100_000}"
        number = f"10.77.{os.getpid() % 250}"
        self.bridge, self.address = f"sb{self._tag}", f"{number}.1"
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for n, name in enumerate(self.names):
            space, port = self.space(name), self._port(name)
            ip("netns", "add", space)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", port, "master", self.bridge, "up")
            ip("-n", space, "addr", "add", f"{number}.{n + 2}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def space(self, name: str) -> str:
        """Return the name of a machine's namespace."""
        return f"ssmd-{self._tag}-{name}"

    def _port(self, name: str) -> str:
        return f"sv{self._tag}{name}"

    def cut(self, name: str) -> None:
        """Cut a machine's link: packets are lost, in both directions, and no end is told of it."""
        ip("link", "set", self._port(name), "down")

    def mend(self, name: str) -> None:
        """Join a machine's link again."""
        ip("link", "set", self._port(name), "up")

    def shape(self, name: str, bits_per_s: int) -> None:
        """Make a machine's link slow, in both directions. Raises CalledProcessError."""
        burst = max(32_768, bits_per_s // 8 // 100)  # bytes: what comes in 10 ms
        limit = ("tbf", "rate", str(bits_per_s), "burst", str(burst), "latency", "50ms")
        for inside, device in (((), self._port(name)), (("-n", self.space(name)), "eth0")):
            subprocess.run(["tc", *inside, "qdisc", "replace", "dev", device, "root", *limit], check=True)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Let this thread's new sockets be the machine's."""
        home, there = os.open(_HOME, os.O_RDONLY), os.open(f"/run/netns/{self.space(name)}", os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(home)
            os.close(home)
            os.close(there)

    def close(self) -> None:
        """Remove all of it."""
        for name in self.names:
            for words in (("link", "del", self._port(name)), ("netns", "del", self.space(name))):
                with contextlib.suppress(RuntimeError):
                    ip(*words)
        with contextlib.suppress(RuntimeError):
            ip("link", "del", self.bridge)


def _enter(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _NETWORK):
        raise OSError(ctypes.get_errno(), "the thread could not enter a network namespace")


def _clock(seconds: int) -> dict[str, str]:
    """Return the environment in which a process's clock is off by some seconds, and its monotonic one is not."""
    if CLOCK is None:
        raise SystemExit("libfaketime is not installed (Debian's package `faketime`)")
    return {"LD_PRELOAD": str(CLOCK), "FAKETIME": f"{seconds:+d}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@functools.cache
def _late_commands(seconds: int) -> ModuleType:
    """Return tests/commands.py once more, whose processes are forked from one that has such a clock."""
    spec = importlib.util.spec_from_file_location(f"commands_{seconds}", commands.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__["_ONE_AT_A_TIME"] = (
        commands._ONE_AT_A_TIME
    )  # else one would end the other's adoption of its process
    kept = dict(os.environ)
    os.environ.update(_clock(seconds))
    try:
        module._forker()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    return module


class MachineDaemon(DaemonProcess):
    """A daemon in a machine's namespace.

    clock_s: the machine's clock is off by so many seconds (libfaketime).
    """

    def __init__(
        self, network: Network, name: str, artifact: Path, data_dir: Path, *args: str, clock_s: int = 0, **env: str
    ) -> None:
        self.network, self.name, self.clock_s = network, name, clock_s
        super().__init__(artifact, data_dir, *args)
        self._environment |= {"PGPASSWORD": PASSWORD, **env, **(_clock(clock_s) if clock_s else {})}
        self.before = (
            f"import ctypes, os; at = os.open('/run/netns/{network.space(name)}', os.O_RDONLY)\n"
            f"assert ctypes.CDLL(None).setns(at, {_NETWORK}) == 0\nos.close(at)"
        )
        if clock_s:  # libfaketime refuses each time.sleep: it moves a monotonic deadline that it does not fake
            self.before += "\nimport select, time\ntime.sleep = lambda s: select.select((), (), (), s) and None"

    def spawn(self) -> None:
        if not self.clock_s:
            super().spawn()
            return
        with self._log.open("ab") as log:
            words = self._command[len(SSMD) :]
            self.process = _late_commands(self.clock_s).start(
                *words, env=self._environment, log=log, before=self.before
            )

    def get(self, path: str) -> tuple[int, Any]:
        with self.network.inside(self.name):
            return super().get(path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.network.inside(self.name):
            return super().post(path, body)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `ssmd` with some words at this machine, beside its daemon."""
        command = ["ip", "netns", "exec", self.network.space(self.name), *SSMD, *words]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)


def tls_cluster(network: Network, *settings: str) -> Cluster:
    """Run a server that machines reach over TLS at the bridge's address, with its data on disk (fsync)."""
    quiet = ("fsync=on", "log_statement=none", "max_connections=100")
    return Cluster(*quiet, *settings, addresses=(network.address,))


def tls_url(network: Network, cluster: Cluster, database: str, port: int | None = None, **parameters: str) -> str:
    """Return a database's address as machines name it. port: of a pooler before the server."""
    given = {"sslrootcert": str(cluster.certificate), **parameters}
    options = "&".join(f"{name}={value}" for name, value in given.items())
    return f"postgresql://ssmd@{network.address}:{port or cluster.port}/{database}?{options}"
