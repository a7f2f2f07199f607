"""A PostgreSQL server of the tests' own: a real one, at a socket and at 127.0.0.1, with a database for each test."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

HOST = "db.example"  # the name in the server's certificate
PROGRAMS = tuple(shutil.which(name) for name in ("initdb", "postgres"))
PASSWORD = "a-word-that-no-log-may-have"
_HBA = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
_SERVER_USER = "postgres"  # the server refuses to run as root


def missing() -> str:
    """Return why there can be no server here; "" if there can."""
    if not all(PROGRAMS):
        return "PostgreSQL's programs initdb and postgres are not in PATH"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    if os.name != "posix":
        return "the server is started as on POSIX"
    if os.geteuid() == 0:
        import pwd

        try:
            pwd.getpwnam(_SERVER_USER)
        except KeyError:
            return f"the server does not run as root, and there is no user {_SERVER_USER!r}"
    return ""


class Cluster:
    """A server with its data in a folder of its own. Its role `ssmd` owns the databases, and is no superuser."""

    def __init__(self, *settings: str, addresses: Sequence[str] = ()) -> None:
        """settings: of the server, such as "fsync=on". addresses: others that it has, for TLS alone."""
        self.addresses = tuple(addresses)
        self.folder = Path(tempfile.mkdtemp(prefix="ssmd-pg-"))
        self.data, self.sockets = self.folder / "data", self.folder
        self.port = _free_port()
        self.settings = ("fsync=off", *settings)
        self.process: subprocess.Popen[bytes] | None = None
        self._made, self._spare = 0, list[str]()
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._user = {"user": _SERVER_USER, "group": _SERVER_USER, "extra_groups": []}
            shutil.chown(self.folder, _SERVER_USER, _SERVER_USER)
        command = [str(PROGRAMS[0]), "-D", str(self.data), "-U", "admin", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run([*command, "--locale=C"], check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **self._user)
        others = "".join(f"hostssl all all {one}/24 scram-sha-256\n" for one in self.addresses)
        (self.data / "pg_hba.conf").write_text(_HBA + others)
        self.certificate = self.data / "server.crt"
        self._certify()
        self.start()
        self.admin(f"CREATE ROLE ssmd LOGIN PASSWORD '{PASSWORD}'")

    def _certify(self) -> None:
        """Make a certificate of HOST, signed by itself."""
        secret = self.data / "server.key"
        addresses = [x509.IPAddress(ipaddress.ip_address(one)) for one in self.addresses]
        certify([x509.DNSName(HOST), *addresses], self.certificate, secret)
        if self._user:
            shutil.chown(secret, _SERVER_USER, _SERVER_USER)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        listen = ",".join(("127.0.0.1", *self.addresses))
        settings = (f"unix_socket_directories={self.sockets}", f"port={self.port}", f"listen_addresses={listen}")
        quick = ("shared_buffers=16MB", "max_connections=60", "ssl=on", "log_statement=all", *self.settings)
        arguments = [word for one in (*settings, *quick) for word in ("-c", one)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(PROGRAMS[1]), "-D", str(self.data), *arguments],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                **self._user,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.admin("SELECT 1")
                return
            except Exception:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.05)

    def end(self, number: signal.Signals = signal.SIGINT) -> None:
        """End the server: at once with SIGINT, or without its knowing with SIGKILL."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)
        if number == signal.SIGKILL:  # its children end when they see that; the next server waits for that
            time.sleep(0.1)

    def close(self) -> None:
        """End the server and remove its data."""
        if self.process is not None and self.process.poll() is None:
            self.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")

    def admin(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement as the superuser. Returns its rows."""
        import psycopg

        where = f"host={self.sockets} port={self.port} user=admin dbname={database}"
        with contextlib.closing(psycopg.connect(where, autocommit=True)) as connection:
            done = connection.execute(statement)
            return done.fetchall() if done.description else []

    def database(self) -> str:
        """Make an empty database of the role `ssmd`. Returns its name."""
        name = self._spare.pop() if self._spare else ""
        if not name:
            self._made += 1
            name = f"test_{self._made}"
            self.admin(f"CREATE DATABASE {name} OWNER ssmd TEMPLATE template0")
        return name

    def encoded(self, encoding: str) -> str:
        """Make a database of another encoding. Returns its name."""
        name = f"of_{encoding.lower()}"
        self.admin(f"CREATE DATABASE {name} OWNER ssmd TEMPLATE template0 ENCODING '{encoding}'")
        return name

    def url(self, database: str, **parameters: str) -> str:
        """Return a database's address at the server's socket. parameters: of it, such as `user`."""
        given = {"host": str(self.sockets), "port": str(self.port), **parameters}
        return f"postgresql://ssmd@/{database}?" + "&".join(f"{name}={value}" for name, value in given.items())

    def empty(self, database: str) -> None:
        """Empty a database for another test: to make one takes longer."""
        self.admin(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
        self.cut_off(database)
        self.admin("DROP SCHEMA IF EXISTS ssmd CASCADE", database)
        self._spare.append(database)

    def cut_off(self, database: str) -> None:
        """End all connections to a database."""
        self.admin(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{database}'")


def certify(names: Sequence[x509.GeneralName], certificate: Path, secret: Path, *, ca: bool = True) -> None:
    """Write a certificate of a server, signed by itself, and its key. ca: it is that of an authority too."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    secret.chmod(0o600)


@contextlib.contextmanager
def cluster(*settings: str) -> Iterator[Cluster]:
    """Run a server until the end."""
    made = Cluster(*settings)
    try:
        yield made
    finally:
        made.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
