"""PgBouncer before a server of the tests: a real one, that gives each transaction any of its connections."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from typing import Any, Self

from cluster import Cluster

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
_USER = "postgres"  # it refuses to run as root


class Pooler:
    """PgBouncer in front of a cluster, at a socket in the cluster's folder. pool_mode is transaction."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        connections: int = 5,
        clients: int = 200,
        port: int = 0,
        roles: tuple[str, ...] = (),
        address: str = "",
    ) -> None:
        """connections: to the server. clients: connections that it takes. port: 0 is any free one.

        roles: those that it takes, each with connections of its own; without them all clients are the role `ssmd`.
        address: another one that it listens at, with TLS and the server's certificate.
        """
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))
            self.port: int = one.getsockname()[1]
        self.folder = cluster.folder
        file = cluster.folder / "pgbouncer.ini"
        settings = {
            "listen_port": self.port,
            "unix_socket_dir": cluster.folder,
            "auth_type": "trust" if roles else "any",
            **({"auth_file": cluster.folder / "roles.txt"} if roles else {}),
            "pool_mode": "transaction",
            "default_pool_size": connections,
            "max_client_conn": clients,
            "stats_users": "admin",
            "logfile": cluster.folder / "pgbouncer.log",
        }
        if address:
            tls = {"client_tls_sslmode": "require", "client_tls_cert_file": cluster.certificate}
            settings |= tls | {"listen_addr": address, "client_tls_key_file": cluster.data / "server.key"}
        (cluster.folder / "roles.txt").write_text("".join(f'"{role}" ""\n' for role in roles))
        forced = "" if roles else " user=ssmd"
        lines = ["[databases]", f"* = host={cluster.sockets} port={cluster.port}{forced}", "[pgbouncer]"]
        file.write_text("\n".join([*lines, *(f"{name} = {value}" for name, value in settings.items())]) + "\n")
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            for path in (file, cluster.folder / "roles.txt"):
                shutil.chown(path, _USER, _USER)
            user = {"user": _USER, "group": _USER, "extra_groups": []}
        assert PROGRAM is not None
        command = ["sh", "-c", f"ulimit -n {clients + 200}; exec {PROGRAM} -q {file}"]
        self.process = subprocess.Popen(command, cwd=cluster.folder, **user)
        deadline = time.monotonic() + 30
        while not (self.folder / f".s.PGSQL.{self.port}").exists():
            assert time.monotonic() < deadline, (self.folder / "pgbouncer.log").read_text()
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, database: str, **parameters: str) -> str:
        """Return a database's address by way of the pooler."""
        given = {"host": str(self.folder), "port": str(self.port), **parameters}
        return f"postgresql://ssmd@/{database}?" + "&".join(f"{name}={value}" for name, value in given.items())

    def clients(self) -> int:
        """Return how many connections it has from clients."""
        import psycopg

        where = f"host={self.folder} port={self.port} user=admin dbname=pgbouncer"
        with psycopg.Connection.connect(where, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
            rows = connection.execute("SHOW CLIENTS").fetchall()
        return len(rows) - 1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
