"""A large body on its way into a file, over a real socket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, serving
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.api.generate.fair_reading import FairPool
from ssmd.api.http.security import Rules, guarded
from ssmd.api.own.sessions import LEAST_BYTES, write_body
from ssmd.machine.room import SPARE_BYTES

HUGE = 1 << 50


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """`/slow` waits for 1.5 seconds, `/full` wants much to stay free."""

    pool = FairPool(lambda client: False)

    async def take(request: Request) -> JSONResponse:
        spare = HUGE if request.url.path == "/full" else SPARE_BYTES
        await write_body(request, tmp_path / "kept", pool, "", within_s=1.5, spare=spare)
        return JSONResponse({"bytes": (tmp_path / "kept").stat().st_size})

    routes = [Route(path, take, methods=["POST"]) for path in ("/slow", "/full")]
    rules = Rules(hosts=frozenset({"localhost"}), max_body_bytes=2 * HUGE)
    with serving(guarded(routes, rules)) as one:
        yield one


def _head(path: str, length: int | None) -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{size}\r\n\r\n".encode()


def test_a_body_that_drips_is_ended(served: Served) -> None:
    with served.connect(_head("/slow", 1000)) as one:
        for _ in range(5):
            one.sendall(b"x")
            time.sleep(0.2)
        assert b" 408 " in (answer := one.recv(4096))
        assert b"connection: close" in answer


def test_a_long_body_has_the_time_that_it_needs(served: Served) -> None:
    with served.connect(_head("/slow", 4 * LEAST_BYTES)) as one:
        for _ in range(4):
            time.sleep(0.5)  # 2 s in all
            one.sendall(b"x" * LEAST_BYTES)
        assert b" 200 " in one.recv(4096)


@pytest.mark.parametrize(("path", "length"), [("/slow", HUGE), ("/full", 100), ("/full", None)])
def test_what_the_disk_has_no_room_for_is_not_taken(
    served: Served, tmp_path: Path, path: str, length: int | None
) -> None:
    with served.connect(_head(path, length) + b"5\r\nabcde\r\n") as one:
        answer = one.recv(4096)
        assert b" 507 " in answer
        while b"free" not in answer:
            more = one.recv(4096)
            assert more, answer
            answer += more
    assert not (tmp_path / "kept").exists() or (tmp_path / "kept").stat().st_size == 0
