"""A model hub on this machine: huggingface_hub's part of the Hugging Face Hub's API over real sockets, and its faults.

What it answers follows huggingface_hub 2.4: GET /api/models/NAME[/revision/REV][?blobs=true] with siblings, git and LFS
hashes; HEAD and GET /NAME/resolve/REV/FILE with etag, x-repo-commit, x-linked-size and -etag, ranges, a redirect of LFS
files to a storage host; errors as x-error-code. That library itself downloads from it (tests/hub/test_pull.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from safetensors.numpy import load, save

from ssmd.refit import catalog
from ssmd.refit.graphfile import StrippedGraph

CHUNK = 16 << 10


@dataclass(frozen=True)
class Asked:
    """A request as it arrived: `host` is its Host header."""

    method: str
    host: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Mirror:
    """A hub with one repository; fields may be changed while it runs. `files` are those of the newest commit."""

    name: str
    files: dict[str, bytes]
    port: int = 0
    revisions: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit
    lfs: tuple[str, ...] = (".safetensors", ".bin", "tokenizer.json")
    asked: list[Asked] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file
    # Faults
    token: str | None = None  # is asked for
    refuse: tuple[int, str] | None = None  # (status, x-error-code) to any request for a file
    api: tuple[int, str] | None = None  # and to any request for the list
    listing: bytes | None = None  # in place of the true one
    entries: list[dict[str, Any]] = field(default_factory=list)  # more siblings
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes of true siblings
    breaks: dict[str, list[int]] = field(default_factory=dict)  # bytes after which the next answers break off
    stalls: dict[str, int] = field(default_factory=dict)  # bytes after which an answer stands still
    wrong: set[str] = field(default_factory=set)  # files that come with a bit turned
    lengths: dict[str, int | None] = field(default_factory=dict)  # content-length; None: chunked
    more: dict[str, int] = field(default_factory=dict)  # bytes that follow a file
    buffer: int | None = None  # bytes of an answer that wait here until they are read; None: megabytes
    ranges: bool = True
    redirects: dict[str, str] = field(default_factory=dict)  # file -> address
    storage: str | None = None  # where LFS files are redirected to
    pages: dict[str, bytes] = field(default_factory=dict)  # of a package index: path -> JSON
    going: threading.Event = field(default_factory=threading.Event)  # set: what stalls goes on

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def commit(self) -> str:
        return self.revisions["main"]

    def asked_for(self, file: str) -> list[Asked]:
        return [a for a in self.asked if a.path.endswith(f"/{file}")]

    def commit_now(self) -> str:
        """A new commit of `files`, which `main` becomes."""
        whole = hashlib.sha1(repr(sorted((n, _sha256(b)) for n, b in self.files.items())).encode())
        self.revisions["main"] = whole.hexdigest()
        return self.commit

    def siblings(self) -> list[dict[str, Any]]:
        rows = []
        for name, content in self.files.items():
            row: dict[str, Any] = {"rfilename": name, "size": len(content)}
            if not name.endswith(self.lfs):
                row["blobId"] = _blob(content)
            else:
                pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{_sha256(content)}\n".encode()
                row["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": len(pointer)}
                row["blobId"] = _blob(pointer)
            rows.append({**row, **self.listed.get(name, {})})
        return rows + self.entries


@contextmanager
def running(name: str, folder: Path | Mapping[str, bytes]) -> Iterator[Mirror]:
    """A mirror of a source checkpoint, on a free port of 127.0.0.1."""
    if isinstance(folder, Path):
        folder = {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}
    mirror = Mirror(name, dict(folder))
    mirror.commit_now()
    handler = type("Handler", (_Handler,), {"mirror": mirror})
    server = _Server(("127.0.0.1", 0), handler)
    mirror.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        mirror.going.set()
        server.shutdown()
        server.server_close()
        thread.join()


def surroundings(home: Path, hub: Mirror | None, **extra: str) -> dict[str, str]:
    """The environment of a command that asks this hub."""
    from test_server import environment  # which imports this file

    kept = {k: v for k, v in environment(home).items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_OFFLINE"))}
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    kept = {k: v for k, v in kept.items() if k.lower() not in proxies}
    kept |= {"HF_HOME": str(home / "hf"), "HF_HUB_DOWNLOAD_TIMEOUT": "20"}
    return {**kept, **({} if hub is None else {"HF_ENDPOINT": hub.url}), **extra}


def sharded(source: Path) -> dict[str, bytes]:
    """The files of a source checkpoint with its weights in two shards."""
    files = {p.name: p.read_bytes() for p in sorted(source.iterdir()) if p.is_file()}
    tensors = sorted(load(files.pop("model.safetensors")).items())
    places: dict[str, str] = {}
    for i, part in enumerate((tensors[::2], tensors[1::2]), 1):
        shard = f"model-{i:05}-of-00002.safetensors"
        files[shard] = save(dict(part))
        places |= {name: shard for name, _ in part}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": places}).encode()
    return files


def fitting(name: str) -> bytes:
    """Return a config.json that the graph of a model of the catalogue fits."""
    return json.dumps(StrippedGraph.open(catalog.files(name=name)[0]).header.config).encode()


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hangs up is part of the tests


class _Handler(BaseHTTPRequestHandler):
    mirror: Mirror
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        m, path = self.mirror, unquote(urlsplit(self.path).path)
        asked = (self.headers.get(name) for name in ("Range", "Authorization"))
        m.asked.append(Asked(self.command, self.headers.get("Host", ""), path, *asked))
        if found := re.fullmatch(rf"/api/models/{re.escape(m.name)}(?:/revision/(.+))?", path):
            self._list(found[1] or "main")
        elif found := re.fullmatch(rf"/{re.escape(m.name)}/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], body=body)
        elif found := re.fullmatch(r"/storage/(.+)", path):  # what a signed address leads to
            self._send(found[1], body=body, headers={})
        elif path in m.pages:
            self._plain(200, {"Content-Type": "application/vnd.pypi.simple.v1+json"}, m.pages[path])
        elif path == "/circle":
            self._plain(302, {"Location": "/circle"})
        elif path.startswith("/api/"):
            self._refuse(404, "RepoNotFound")
        else:
            self._plain(404, {})

    def _list(self, revision: str) -> None:
        m = self.mirror
        if m.api is not None:
            return self._refuse(*m.api)
        if not self._knows():
            return self._refuse(401, "RepoNotFound")
        commit = self._commit(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        said = {"id": m.name, "modelId": m.name, "sha": commit, "gated": False, "siblings": m.siblings()}
        return self._plain(200, {"Content-Type": "application/json"}, m.listing or json.dumps(said).encode())

    def _file(self, revision: str, name: str, *, body: bool) -> None:
        m, commit = self.mirror, self._commit(revision)
        if m.refuse is not None:
            return self._refuse(*m.refuse)
        if not self._knows():
            return self._refuse(401, "GatedRepo")
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if name not in m.files:
            return self._refuse(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit}
        location = m.redirects.get(name)
        if name.endswith(m.lfs):
            headers["X-Linked-Etag"] = f'"{_sha256(m.files[name])}"'
            headers["X-Linked-Size"] = str(len(m.files[name]))
            if m.storage is not None:
                location = f"{m.storage}/storage/{quote(name)}?signature=secret"
        if location is not None:
            return self._plain(302, {**headers, "Location": location})
        return self._send(name, body=body, headers=headers)

    def _send(self, name: str, *, body: bool, headers: dict[str, str]) -> None:
        m = self.mirror
        content = m.files[name]
        if name in m.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        etag = _sha256(content) if name.endswith(m.lfs) else _blob(content)
        headers = {**headers, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        start, status = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and m.ranges:
            start, status = int(asked[1]), 206
            if start >= len(content):
                return self._plain(416, {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if name in m.more:
            content += bytes(m.more[name])
        left = len(content) - start
        length = m.lengths.get(name, left)
        if m.buffer is not None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, m.buffer)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if not body:
            return None
        ends = min(m.breaks[name].pop(0), left) if m.breaks.get(name) else left
        for at in range(0, ends, CHUNK):
            if name in m.stalls and at + CHUNK > m.stalls[name]:
                self.wfile.flush()
                m.going.wait(60)
            part = content[start + at : start + min(at + CHUNK, ends)]
            self.wfile.write(part if length is not None else b"%x\r\n%b\r\n" % (len(part), part))
            m.sent[name] = m.sent.get(name, 0) + len(part)
        if length is None and ends == left:
            self.wfile.write(b"0\r\n\r\n")
        if ends < left or (length is not None and length != left):
            self.close_connection = True
        return None

    def _commit(self, revision: str) -> str | None:
        if revision in self.mirror.revisions.values():
            return revision
        return self.mirror.revisions.get(revision)

    def _knows(self) -> bool:
        token = self.mirror.token
        return token is None or self.headers.get("Authorization") == f"Bearer {token}"

    def _refuse(self, status: int, code: str) -> None:
        words = "\x1b[31mthe server's own words\x1b[0m"  # which no terminal should be shown
        self._plain(status, {"X-Error-Code": code}, json.dumps({"error": words}).encode())

    def _plain(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _sha256(content: Any) -> str:
    """Return the hash of bytes, or the one that a file which is made as it is read has."""
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else str(content.sha256)


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
