"""/ and /page/…: the web page, from files that are read once. No key is needed for them, only for its requests.

A client that wants no HTML gets Ollama's text at /, by which its clients find out if it runs.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

ROOT = "/page/"
_INDEX = "index.html"
_OLLAMAS = "Ollama is running"  # its clients compare it
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_ALWAYS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


class PageError(RuntimeError):
    """The page's files are missing."""


@dataclass(frozen=True)
class _File:
    """A file of the page. etag: a hash of the content."""

    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = {**_ALWAYS, "etag": self.etag}
        known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


class Page:
    """All files of the page by their paths. No part of a request is ever used as a file name."""

    def __init__(self, files: Mapping[str, _File]) -> None:
        self._files = files

    @staticmethod
    def read() -> Page:
        """Read the files, of the wheel or of the checkout. Raises PageError."""
        found = {ROOT + name: _file(entry) for name, entry in _walk(_folder(), "")}
        if ROOT + _INDEX not in found:
            raise PageError(f"the page has no {_INDEX}; install ssmd again")
        return Page(found | {"/": found[ROOT + _INDEX]})

    @property
    def paths(self) -> frozenset[str]:
        """Return the paths that are served, but for `/`."""
        return frozenset(self._files) - {"/"}

    @property
    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, as sent."""
        return {path: len(self._files[path].content) for path in self.paths}

    async def answer(self, request: Request) -> Response:
        path = request.scope["path"]
        found = self._files.get(path)
        if found is None:
            raise HTTPException(404)
        if path != "/":
            return found.answer(request)
        wants = "text/html" in request.headers.get("accept", "").lower()  # as every browser does that opens a page
        answer = found.answer(request) if wants else PlainTextResponse(_OLLAMAS, headers=_ALWAYS)
        answer.headers["vary"] = "accept"
        return answer


def _folder() -> Traversable:
    """Return the folder of the page's files: in the package, or in a checkout beside it. Raises PageError."""
    package = importlib.resources.files("ssmd")
    for folder in (package / "web", Path(str(package)).parent / "clients" / "web"):
        if folder.is_dir():
            return folder
    raise PageError(f"the page is missing from {package / 'web'}; install ssmd again")


def _walk(folder: Traversable, within: str) -> Iterator[tuple[str, Traversable]]:
    """Yield each file that can be sent, and its name below the folder. Licences and notes of vendored code are not."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{within}{entry.name}/")
        elif Path(entry.name).suffix in _TYPES:
            yield within + entry.name, entry


def _file(entry: Traversable) -> _File:
    content = entry.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, _TYPES[Path(entry.name).suffix], etag)
