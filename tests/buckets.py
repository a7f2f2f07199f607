"""An S3-compatible bucket of the tests' own: moto's server in a process of its own, and a door before it that fails."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from openai_client import client_python

BUCKET = "conversations"
KEY, SECRET = "AKIAOFTHETESTS", "a-key-that-no-log-may-have"
DENIED = (
    "<?xml version='1.0'?><Error><Code>SignatureDoesNotMatch</Code><Message>The request signature we calculated does "
    f"not match</Message><AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign></Error>"
)
_AS = {
    "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host",
    "Content-Type": "application/octet-stream",
}


def missing() -> str:
    """Return why there can be no bucket here; "" if there can."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        return "obstore is not installed"
    try:
        found = subprocess.run([client_python(), "-c", "import moto.server"], capture_output=True, check=False)
    except AssertionError as err:
        return str(err)
    return "moto is not installed in .venv-client" if found.returncode else ""


class BucketServer:
    """moto's server, at a free port of 127.0.0.1, with one bucket."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ssmd-s3-"))
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port: int = one.getsockname()[1]
        with (self.folder / "log").open("wb") as log:
            command = [client_python(), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                break
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)
        self.call("PUT", "")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, path: str, data: bytes | None = None, bucket: str = BUCKET) -> bytes:
        """Ask the server itself, past every check. path: of an object, or a query. Returns the answer's body."""
        url = f"http://127.0.0.1:{self.port}/{bucket}" + (path if path.startswith("?") else f"/{path}" if path else "")
        request = urllib.request.Request(url, data=data, method=method, headers=_AS)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            read: bytes = answer.read()
            return read

    def keys(self, prefix: str = "") -> list[str]:
        """List the keys of all objects below a prefix."""
        return self._texts(self.call("GET", f"?list-type=2&max-keys=10000&prefix={prefix}"), "Contents", "Key")

    def uploads(self) -> list[str]:
        """List the keys of the uploads that were not ended."""
        return self._texts(self.call("GET", "?uploads"), "Upload", "Key")

    @staticmethod
    def _texts(raw: bytes, of: str, name: str) -> list[str]:
        found = ElementTree.fromstring(raw).iter()
        return [str(one.text) for its in found if its.tag.endswith(of) for one in its if one.tag.endswith(name)]

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.port)


def environment(port: int) -> dict[str, str]:
    """Return the settings by which a client finds a server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


class Door:
    """A port through which a bucket is reached. mode: open, silent, shut, slow, or denied, from the next byte on."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.port_behind, self.mode, self._tls = port, "open", tls
        self.asked = bytearray()  # the beginnings of what clients sent
        self.passed, self.returned = 0, 0  # bytes of clients, of the server
        self.silent_after: int | None = None  # bytes of clients
        self.quiet_after: int | None = None  # bytes of the server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self.mode = "shut"
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as ends, contextlib.suppress(OSError):
            ends.enter_context(client)
            if self.mode == "shut":
                return
            if self._tls is not None:
                client = ends.enter_context(self._tls.wrap_socket(client, server_side=True))
            with socket.create_connection(("127.0.0.1", self.port_behind)) as server:
                back = threading.Thread(target=self._back, args=(server, client), daemon=True)
                back.start()
                while data := client.recv(1 << 16):
                    self.passed += len(data)
                    self.asked += data[:4096]
                    if self.silent_after is not None and self.passed > self.silent_after:
                        self.mode = "silent"
                    if self.mode == "shut":
                        return
                    if self.mode == "denied":
                        head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(DENIED)}\r\nConnection: close\r\n\r\n"
                        client.sendall((head + DENIED).encode())
                        return
                    if self.mode != "silent":
                        server.sendall(data)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 13):
                if self.mode == "slow":
                    time.sleep(0.02)
                while self.mode == "silent":
                    time.sleep(0.02)
                self.returned += len(data)
                if self.quiet_after is not None and self.returned > self.quiet_after:
                    self.mode = "silent"
                client.sendall(data)


@contextlib.contextmanager
def bucket_server() -> Iterator[BucketServer]:
    """Run a server until the end."""
    made = BucketServer()
    try:
        yield made
    finally:
        made.close()
