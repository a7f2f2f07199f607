"""A model hub over HTTP: the list of a model's repository at a revision, and the bytes of its files.

The hub is https://huggingface.co, or the one that HF_ENDPOINT names. The library huggingface_hub provides the session
(proxies, certificates, offline mode), the addresses and the token. Requests are made here, so that all answers are
limited and checked, and the token is sent only to the hub's own origin.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import httpx2
from huggingface_hub import constants, get_session, get_token, hf_hub_url

from ssmd import __version__
from ssmd.machine.installation import to_install

MAX_LISTING_BYTES = 8 << 20  # size of a repository's list: enough for 30,000 files; parsed, it may take 30 times that
MAX_FILE_BYTES = 1 << 50  # size of a file, as a list gives it
LIST_S = 300.0  # time for a list to arrive whole
SLOW_S, SLOW_BYTES = 60.0, 64 << 10  # an answer that brings fewer bytes in that time is given up
HEADERS_TIMEOUTS = 6  # time for an answer to begin, in times of the timeout of a single read
MAX_REDIRECTS = 10
MAX_ERROR_CHARACTERS = 200
_NAME = re.compile(
    r"(?=.{3,96}\Z)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?/[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[!-~]{1,200}")
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
_BUSY = (408, 429, 500, 502, 503, 504)
OTHERWISE = "ssmd build FOLDER"  # for a checkpoint downloaded by other means; cli/making.py replaces it for some models


class HubError(RuntimeError):
    """A request that the hub refused, or an answer that is invalid; the message says what to do."""


class HubUnreachable(HubError):
    """A connection that failed or broke: the same request may succeed later."""


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it. size: in bytes. sha256: of a file in LFS; blob: git's hash of any other file."""

    name: str
    size: int
    sha256: str | None
    blob: str | None


@dataclass(frozen=True)
class Listing:
    """The list of a repository at `commit`, the meaning of `revision`. Entries are checked when they are looked up."""

    name: str
    revision: str
    commit: str
    entries: Mapping[str, Mapping[str, Any]]

    def file(self, name: str) -> HubFile:
        """Return the listed file of that name. Raises HubError if it is not listed, or without a size and a hash."""
        entry = self.entries.get(name)
        if entry is None:
            raise HubError(f"{self.name} has no file {name!r} at {self.commit}")
        lfs = entry.get("lfs")
        size, sha256, blob = entry.get("size"), None, entry.get("blobId")
        if isinstance(lfs, dict):
            sha256, blob = lfs.get("sha256"), None
            if lfs.get("size") != size:
                raise HubError(f"{self.name}: the hub lists {name!r} with two sizes, {size!r} and {lfs.get('size')!r}")
        if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
            raise HubError(f"{self.name}: the hub lists {name!r} with the size {str(size)[:MAX_ERROR_CHARACTERS]}")
        if not (_matches(_SHA256, sha256) or _matches(_SHA1, blob)):
            raise HubError(f"{self.name}: the hub lists {name!r} without a hash, so nothing could be checked")
        return HubFile(name, size, sha256, blob)

    @property
    def lister(self) -> str:
        return "the hub"

    def url(self, name: str) -> str:
        return hf_hub_url(self.name, name, revision=self.commit)

    def refusal(self, response: httpx2.Response, file: str) -> HubError:
        return refusal(response, self.name, file=file)


def is_name(text: str) -> bool:
    """Return True if a text can be a model's name on a hub: owner/name, by huggingface_hub's rules."""
    return _NAME.fullmatch(text) is not None and not re.search(r"--|\.\.|\.git\Z", text)


def offline() -> bool:
    """Return True if HF_HUB_OFFLINE forbids requests."""
    return constants.is_offline_mode()


def listing(name: str, revision: str) -> Listing:
    """Return the list of the repository `name` at a branch, tag or commit. Raises HubError."""
    if not is_name(name):
        raise HubError(f"{name!r} is not a model's name; expected owner/name, such as ibm-granite/granite-4.0-h-350m")
    if not _REVISION.fullmatch(revision):
        raise HubError(f"{revision!r} is not a revision; expected a branch, a tag or a commit's 40 hexadecimal digits")
    url = f"{constants.ENDPOINT}/api/models/{name}/revision/{quote(revision, safe='')}?blobs=true"
    try:
        with request(url) as response:
            if response.status_code != 200:
                raise refusal(response, name, revision=revision)
            said = whole(response, MAX_LISTING_BYTES, f"{name}: the hub's list of files")
    except httpx2.HTTPError as err:
        raise HubUnreachable(
            f"{host()} cannot be reached{through(url)} ({reason(err)}): check the connection, or HF_ENDPOINT; to use "
            f"a checkpoint downloaded by other means, run: {OTHERWISE}"
        ) from err
    try:
        info = json.loads(said)
        commit, siblings = info["sha"], info["siblings"]
        entries = {entry["rfilename"]: entry for entry in siblings}
        if not all(isinstance(file, str) for file in entries):
            raise TypeError("a file's name is not a text")
    except (ValueError, RecursionError, KeyError, TypeError) as err:
        raise HubError(f"{host()} does not answer as a model hub does: check HF_ENDPOINT") from err
    if not _matches(COMMIT, commit):
        raise HubError(f"{name}: the hub names {str(commit)[:60]!r} as the commit of {revision!r}")
    if COMMIT.fullmatch(revision) and commit != revision:
        raise HubError(f"{name}: commit {revision} was requested, but the hub answers with {commit}")
    if len(entries) != len(siblings):
        raise HubError(f"{name}: the hub lists a file twice")
    return Listing(name, revision, commit, entries)


@contextmanager
def request(url: str, start: int = 0, *, accept: str = "*/*") -> Iterator[httpx2.Response]:
    """GET `url` from byte `start` on. The answer's body is not read yet (`parts` does), and may be a refusal.

    Redirects are followed here. The token is sent only to the hub's origin (scheme, host and port), and never again
    after a redirect has left it. Raises HubError if a body is compressed, and httpx2.TransportError if the connection
    fails.
    """
    hub, target, at_home = _url(constants.ENDPOINT), _url(url), True
    for _ in range(MAX_REDIRECTS):
        # identity: a file's size and the range asked for are those of its bytes, not of a compressed form
        headers = {"user-agent": f"ssmd/{__version__}", "accept-encoding": "identity", "accept": accept}
        at_home = at_home and target.origin == hub.origin
        token = _token() if at_home else None
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        if start:
            headers["range"] = f"bytes={start}-"
        response = _begun(target, headers)
        try:
            if not response.has_redirect_location:
                coding = response.headers.get("content-encoding", "identity").strip().lower()
                if coding != "identity":  # a bomb, or another size than the list gives
                    raise HubError(
                        f"{target.host} sends a compressed answer (content-encoding {coding[:40]!r}), which was not "
                        "asked for: check HF_ENDPOINT, and the proxy in between"
                    )
                yield response
                return
            new = _url(response.headers["location"], target)
        finally:
            response.close()
        if new.scheme not in ("http", "https") or (target.scheme, new.scheme) == ("https", "http"):
            raise HubError(f"{target.host} redirects from {target.scheme} to {new.scheme}, which is not followed")
        target = new
    raise HubError(f"{target.host} redirects in a circle")


def _begun(target: httpx2.URL, headers: dict[str, str]) -> httpx2.Response:
    """Return the answer to a GET when its headers are here. Raises HubError, and httpx2.TransportError.

    The library's timeout counts for each read. A server that sends a header a letter at a time, or interim answers
    (1xx) without end, never runs into it. So a thread waits for the headers, and is left behind when they are late.
    """
    client, timeout = _session(target), constants.HF_HUB_DOWNLOAD_TIMEOUT
    asked = client.build_request("GET", target, headers=headers, timeout=timeout)
    answer: Future[httpx2.Response] = Future()

    def wait() -> None:
        try:
            response = client.send(asked, stream=True, follow_redirects=False)
        except BaseException as err:
            answer.set_exception(err)
        else:
            answer.set_result(response)

    threading.Thread(target=wait, name="ssmd-headers", daemon=True).start()
    try:
        return answer.result(HEADERS_TIMEOUTS * timeout)
    except TimeoutError as err:
        raise HubUnreachable(
            f"{target.host} did not begin its answer within {HEADERS_TIMEOUTS * timeout:.0f} s: try again later"
        ) from err


def parts(response: httpx2.Response) -> Iterator[bytes]:
    """Yield the bytes of a body. Raises HubUnreachable if it arrives too slowly, and httpx2.TransportError."""
    since, here = time.monotonic(), 0
    for part in response.iter_bytes():
        yield part
        here += len(part)
        if time.monotonic() - since > SLOW_S:
            if here < SLOW_BYTES:
                raise HubUnreachable(f"{response.url.host} sent only {here} bytes in {SLOW_S:.0f} s: try again later")
            since, here = time.monotonic(), 0


def whole(response: httpx2.Response, most: int, what: str) -> bytearray:
    """Return a body of at most `most` bytes. Raises HubError with `what` it is, and httpx2.TransportError."""
    read, deadline = bytearray(), time.monotonic() + LIST_S
    for part in parts(response):
        read += part
        if len(read) > most:
            raise HubError(f"{what} is longer than {most} bytes")
        if time.monotonic() > deadline:
            raise HubUnreachable(f"{what} did not arrive within {LIST_S:.0f} s: try again later")
    return read


def _session(target: httpx2.URL) -> httpx2.Client:
    """Return the library's session, or one without proxies if the library's fails on a proxy that NO_PROXY leaves out.

    Raises HubError if the environment names a proxy for `target` that cannot be used.
    """
    try:
        return get_session()
    except (ImportError, ValueError, httpx2.InvalidURL) as err:
        if proxy_bypass(target.host):
            return _direct()
        variable, proxy = _proxy(target) or next(filter(None, map(_named, ("all", "https", "http"))), ("", ""))
        if not variable:
            raise
        if proxy.startswith("socks") and isinstance(err, ImportError):
            raise HubError(
                f"{variable} names a SOCKS proxy, {_without_secrets(proxy)}, for which the package socksio is not "
                f"installed; install it with: {to_install('socksio')}"
            ) from err
        raise HubError(
            f"{variable} is {_without_secrets(proxy)!r}, which is not a proxy's address ({reason(err)})"
        ) from err


@cache
def _direct() -> httpx2.Client:
    """Return a session that uses no proxy, with the certificates that the environment names."""
    return httpx2.Client(verify=httpx2.create_ssl_context(trust_env=True), trust_env=False)


def through(url: str) -> str:
    """Return a phrase with the proxy of an address and the variable that names it, for a message; or ""."""
    try:
        found = _proxy(httpx2.URL(url))
    except (httpx2.InvalidURL, ValueError):
        return ""
    return "" if found is None else f" through the proxy {_without_secrets(found[1])} that {found[0]} names"


def _proxy(url: httpx2.URL) -> tuple[str, str] | None:
    """Return the variable and its proxy, by the library's rules from urllib: NO_PROXY counts."""
    if proxy_bypass(url.host):
        return None
    return _named(url.scheme) or _named("all")


def _named(scheme: str) -> tuple[str, str] | None:
    """Return the variable and the proxy of a scheme; the lower-case variable comes first."""
    for variable in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
        if os.environ.get(variable):
            return variable, os.environ[variable]
    proxy = getproxies().get(scheme)
    return None if proxy is None else ("the system's settings", proxy)


def _without_secrets(proxy: str) -> str:
    """Return a proxy's address without its user and password."""
    scheme, there, rest = proxy.rpartition("://")
    return reason(ValueError(f"{scheme}{there}{rest.rpartition('@')[2]}"))


def refusal(response: httpx2.Response, name: str, *, revision: str = "", file: str = "") -> HubError:
    """Return the error for an answer that is neither 200 nor 206 to a request for a model's `revision` or `file`.

    It never quotes the server: a body may be endless, and may hold control sequences for a terminal.
    """
    status, code, where = response.status_code, response.headers.get("x-error-code", ""), response.url.host
    known = _token() is not None
    if status in _BUSY:
        after = re.fullmatch(r"[0-9]{1,5}", response.headers.get("retry-after", ""))
        when = f"in {after[0]} s" if after else "later"
        return HubUnreachable(f"{where} is busy or has a problem (HTTP {status}): try again {when}")
    if code == "GatedRepo":
        return HubError(
            f"{name} is gated: accept its terms at {_web()}/{name}, then set HF_TOKEN to a token of the account that "
            "did"
        )
    if code == "RevisionNotFound":
        return HubError(f"{name} has no revision {revision!r}: --revision takes a branch, a tag or a whole commit hash")
    if file and status == 404:
        return HubError(f"the hub lists {file} of {name}, but {where} does not have it: try again later")
    if code == "RepoNotFound" or status == 404 or (status == 401 and not known):
        return HubError(
            f"there is no model {name} at {host()}, or it is private: check the name; for a private one set HF_TOKEN "
            "to a token that may read it"
        )
    if status == 401:
        return HubError(f"{where} does not accept the token in HF_TOKEN: make another at {_web()}/settings/tokens")
    if status == 403:
        return HubError(f"{where} forbids reading {name}: set HF_TOKEN to a token that may read it")
    return HubError(f"{where} answers {status} to a request for {file or 'the files'} of {name}: check HF_ENDPOINT")


def reason(err: Exception) -> str:
    """Return the reason why a connection failed, short and printable."""
    text = str(err)[:MAX_ERROR_CHARACTERS] or type(err).__name__
    return "".join(c if c.isprintable() else " " for c in text)


def host() -> str:
    """Return the hub's host for messages: the whole address may contain a password."""
    return _url(constants.ENDPOINT).netloc.decode("ascii", "replace").rpartition("@")[2]


def _web() -> str:
    return f"{_url(constants.ENDPOINT).scheme}://{host()}"


def _token() -> str | None:
    """Return HF_TOKEN for the hub that the environment names; the login of `hf auth login` only for huggingface.co."""
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    given = (os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or "").strip()
    if not given and constants.ENDPOINT == "https://huggingface.co":
        given = get_token() or ""
    if given and not re.fullmatch(r"[!-~]+", given):
        raise HubError("HF_TOKEN contains characters that are not allowed in a token")
    return given or None


def _url(text: str, base: httpx2.URL | None = None) -> httpx2.URL:
    try:
        url = httpx2.URL(text) if base is None else base.join(text)
    except (httpx2.InvalidURL, ValueError) as err:
        raise HubError(f"{text[:MAX_ERROR_CHARACTERS]!r} is not an address of a hub; check HF_ENDPOINT") from err
    if base is None and not (url.scheme in ("http", "https") and url.host):
        raise HubError(f"HF_ENDPOINT = {text[:MAX_ERROR_CHARACTERS]!r} is not an address; expected https://…")
    return url


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
