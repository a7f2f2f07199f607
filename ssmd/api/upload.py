"""A large body on its way into a file: it must come at a least speed, and leave room on the disk."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request

from ssmd.api.body import READ_TIMEOUT_S
from ssmd.engine.terms import Rejected
from ssmd.machine.room import SPARE_BYTES, check_room
from ssmd.machine.size import show_size

LEAST_BYTES = 1 << 20  # in READ_TIMEOUT_S


async def write_body(
    request: Request, file: Path, *, within_s: float = READ_TIMEOUT_S, spare: int = SPARE_BYTES
) -> None:
    """Write the body into a new private file. It is to be stored after that, so its size must be free twice.

    Raises Rejected, with 507 where there is no room for it, with 408 when `LEAST_BYTES` take longer than `within_s`.
    """
    parts, left_s, seen = aiter(request.stream()), within_s, 0
    try:
        check_room(file.parent, 2 * int(request.headers.get("content-length", 0)) + spare)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            while True:
                began = time.monotonic()  # the disk's own time does not count
                try:
                    async with asyncio.timeout(left_s):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise _late(within_s) from None
                if part is None:
                    return
                left_s, seen = left_s - (time.monotonic() - began), seen + len(part)
                if seen >= LEAST_BYTES:
                    left_s, seen = within_s, 0
                await asyncio.to_thread(_write, out, part, file.parent, spare)
    except OSError as err:
        reason = err.strerror or str(err)
        raise Rejected(f"the file cannot be kept here: {reason}", status=507, code="storage_error") from err


def _write(out: BinaryIO, part: bytes, folder: Path, spare: int) -> None:
    check_room(folder, len(part) + spare)
    out.write(part)


def _late(within_s: float) -> Rejected:
    return Rejected(
        f"less than {show_size(LEAST_BYTES)} of the body arrived within {within_s:g} s", status=408, code="body_timeout"
    )
