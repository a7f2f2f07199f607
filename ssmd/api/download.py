"""A large file on its way to a client: few are at a time, and it must be taken at a least speed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from ssmd.api.body import READ_TIMEOUT_S
from ssmd.api.upload import LEAST_BYTES
from ssmd.engine.terms import Rejected

log = logging.getLogger(__name__)
MOST = 16
MOST_OF_ONE = 4
RETRY_AFTER_S = 5


class Downloads:
    """Files that are made or sent, of each client. In the event loop only."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, client: str) -> Iterator[None]:
        """Count a file of a client, until it is gone. Raises Rejected, with 503 where there are too many."""
        if self._of[client] >= MOST_OF_ONE or self._of.total() >= MOST:
            raise Rejected(
                f"{self._of[client]} files are on their way to this client, {self._of.total()} to all, of at most "
                f"{MOST_OF_ONE} and {MOST}; try again when one has arrived",
                status=503,
                code="exports_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self._of[client] += 1
        try:
            yield
        finally:
            self._of[client] -= 1
            self._of = +self._of


class PassingFile(FileResponse):
    """A file that is gone after it was sent, or could not be, and what is held for it with it.

    A client that takes less than `LEAST_BYTES` of it within `within_s` is given up.
    """

    def __init__(
        self, file: Path, held: contextlib.ExitStack, name: str = "file", *, within_s: float = READ_TIMEOUT_S
    ) -> None:
        super().__init__(file, filename=name, media_type="application/octet-stream")
        self._held, self._within_s = held, within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left_s, taken = self._within_s, 0

        async def send_in_time(message: Message) -> None:
            nonlocal left_s, taken
            began = time.monotonic()  # the disk's own time does not count
            async with asyncio.timeout(left_s):
                await send(message)
            left_s, taken = left_s - (time.monotonic() - began), taken + len(message.get("body", b""))
            if taken >= LEAST_BYTES:
                left_s, taken = self._within_s, 0

        with self._held:
            try:
                await super().__call__(scope, receive, send_in_time)
            except TimeoutError:
                log.warning("a client reads so slowly that its export is given up")


@contextlib.contextmanager
def removed(file: Path) -> Iterator[None]:
    """Remove a file at the end, if it is there."""
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
