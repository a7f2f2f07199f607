"""A Python package index: the address of one file, from its JSON pages (PEP 691).

The index is the one that pip or uv are set to use here, else PyPI. Only the address of a file is taken from it: the
downloaded file must have the size and the hash that the caller knows.
"""

from __future__ import annotations

import configparser
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import platformdirs

from ssmd.hub import hub
from ssmd.hub.hub import HubError, HubFile, HubUnreachable

PYPI = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
MAX_PAGE_BYTES = 8 << 20  # size of a package's page; PyPI's page of numpy has 2 MB


@dataclass(frozen=True)
class PackageFile:
    """A file of the package `name`, which the index has at `address`."""

    name: str
    address: str

    @property
    def lister(self) -> str:
        return "the index"

    def url(self, name: str) -> str:
        return self.address

    def refusal(self, response: httpx2.Response, file: str) -> HubError:
        return _refusal(response, file)


def listed(package: str, file: HubFile) -> PackageFile:
    """Return the place of a package's file. Raises HubError if the index lists none of this name, hash and size."""
    index = _address(index_url(), None)
    page = index.copy_with(raw_path=index.raw_path.rstrip(b"/") + b"/" + package.encode() + b"/")
    try:
        with hub.request(str(page), accept=JSON) as response:
            if response.status_code != 200:
                raise _refusal(response, package)
            said = hub.whole(response, MAX_PAGE_BYTES, f"the page of {package} at {page.host}")
    except httpx2.HTTPError as err:
        raise HubUnreachable(f"{page.host} cannot be reached{hub.through(str(page))} ({hub.reason(err)})") from err
    try:
        [entry] = [e for e in json.loads(said)["files"] if e["filename"] == file.name]
        sha256, size, where = entry["hashes"].get("sha256"), entry.get("size", file.size), entry["url"]
        if not isinstance(where, str):
            raise TypeError("no address")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as err:
        raise HubUnreachable(f"{page.host} does not list {file.name} in the format of PEP 691") from err
    if sha256 != file.sha256 or size != file.size:
        raise HubError(f"{page.host} lists another file as {file.name}: its hash or size is not the published one's")
    found = _address(where, page)
    if found.origin == index.origin and not found.userinfo:
        found = found.copy_with(userinfo=index.userinfo)
    return PackageFile(package, str(found))


def host() -> str:
    """Return the index's host for messages. Raises HubError if its address is invalid."""
    return _address(index_url(), None).host


def index_url() -> str:
    """Return the index that this environment is set to use: by a variable, pip's or uv's settings file, else PyPI."""
    for variable in VARIABLES:
        if said := os.environ.get(variable, "").strip():
            return said.partition("=")[2] if variable.startswith("UV_") and "=" in said.partition("/")[0] else said
    return next(_settings(), PYPI)


def _settings() -> Iterator[str]:
    """Yield the indexes of settings files, the nearest file first. A file that cannot be read is skipped."""
    home = Path.home()
    name = "pip.ini" if sys.platform == "win32" else "pip.conf"
    folders = (Path(sys.prefix), Path(platformdirs.user_config_dir("pip", appauthor=False, roaming=True)))
    own = os.environ.get("PIP_CONFIG_FILE", "")
    files = (own, *(f / name for f in folders), home / ".config/pip" / name, home / ".pip" / name, Path("/etc") / name)
    for file in (str(f) for f in files if f):
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(OSError, UnicodeError, configparser.Error):
            parser.read(file, "utf-8-sig")
            if said := parser.get("global", "index-url", fallback="").strip():
                yield said
    for folder in (platformdirs.user_config_dir("uv", appauthor=False, roaming=True), "/etc/uv"):
        with suppress(OSError, UnicodeError, tomllib.TOMLDecodeError, AttributeError, TypeError):
            read = tomllib.loads((Path(folder) / "uv.toml").read_text("utf-8-sig"))
            defaults = [i.get("url") for i in read.get("index", ()) if i.get("default")]
            for said in (*defaults, read.get("index-url"), read.get("pip", {}).get("index-url")):
                if isinstance(said, str) and said.strip():
                    yield said.strip()


def _address(text: str, base: httpx2.URL | None) -> httpx2.URL:
    """Parse an address. Raises HubError if it is invalid, or if an index over https names a file over http."""
    try:
        url = httpx2.URL(text) if base is None else base.join(text)
    except (httpx2.InvalidURL, ValueError):
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise HubError(f"{_shown(text)} is not an address of a package index; is {' or '.join(VARIABLES[:2])} set?")
    if base is not None and (base.scheme, url.scheme) == ("https", "http"):
        raise HubError(f"{base.host} leads from https to http, which is not followed")
    return url


def _shown(text: str) -> str:
    """Return an address for a message, without the password that it may contain."""
    return repr(text.rpartition("@")[2][: hub.MAX_ERROR_CHARACTERS])


def _refusal(response: httpx2.Response, what: str) -> HubError:
    """Return the error for an answer, without quoting the server. Another index, or a later request, may succeed."""
    return HubUnreachable(f"{response.url.host} answers {response.status_code} to a request for {what}")
