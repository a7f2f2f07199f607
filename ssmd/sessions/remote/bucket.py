"""The packs of a remote in an S3-compatible bucket: an object each, with the names that a folder for bytes has.

    <prefix>/ssmd-packs.json                        {"format": 1, "of": a database's random name}
    <prefix>/packs/<2 digits>/<BLAKE2b-256>         the bytes of a state

Keys, region and endpoint come from the environment, or the keys from a file: an address is in the list of processes.
Each request has an end, so that a silent bucket delays no thread for long. An error of the client has the body
of the answer, which may have a key: it is not shown. What is read is another machine's word: each pack is checked.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from ssmd.machine.installation import to_add
from ssmd.machine.privatefile import read_secret
from ssmd.sessions.remote import packs
from ssmd.sessions.remote.packs import MAX_MARK, MAX_NAMES, PACK, PART, check_mark, digest_of, folder_of, name_of
from ssmd.sessions.remote.postgres.address import BucketAddress, is_here
from ssmd.sessions.remote.remote import InvalidTurn, RemoteError

if TYPE_CHECKING:
    from obstore import ObjectMeta

ANSWER_S = 10.0  # s until a request without a pack is given up, and one that reads a pack and gets nothing more
PIECE_S = 60.0  # s for a request with up to WHOLE bytes, or two with a PART_BYTES each: 1.4 Mbit/s
AWAY_S = 30.0  # s after a request without an answer in which there are no others
WHOLE = 8 << 20  # bytes of a pack that one request sends or reads; more are several requests
PART_BYTES = 5 << 20  # bytes of a part of a larger pack: the least that S3 takes
_AT_ONCE = 2  # parts
_CONNECT_S = 3.0
_PAGE = 1000  # names that an answer lists
_MAX_FILE = 1 << 20  # bytes of a file of keys or certificates
_REGION = "us-east-1"  # where the environment names none
_CODE = re.compile("<Code>([A-Za-z]{1,60})</Code>")
_WORDS = {  # by the code that S3 names
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "it does not allow this with these keys",
    "InvalidAccessKeyId": "it does not know this access key",
    "SignatureDoesNotMatch": "the secret key is not that of the access key, or AWS_REGION is another one",
    "AuthorizationHeaderMalformed": "AWS_REGION is not its region",
    "PermanentRedirect": "AWS_REGION or AWS_ENDPOINT_URL is not its own",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is invalid",
    "RequestTimeTooSkewed": "the clock of this computer is wrong by more than it allows",
    "NotImplemented": "it does not support conditional PUT (If-None-Match)",
    "QuotaExceeded": "it is full",
    "XMinioStorageFull": "it is full",
}


@dataclass(frozen=True)
class _Access:
    """The endpoint of a bucket, and the keys that open it. certificates: PEM of a CA beside the system's; or None."""

    endpoint: str
    region: str
    credentials: dict[str, Any]
    certificates: bytes | None


class BucketPacks:
    """The packs of a remote in a bucket: an object each, named by the BLAKE2b-256 of its bytes. Thread-safe."""

    def __init__(self, address: BucketAddress, mark: str) -> None:
        """mark: name of the object by which the bucket is known.

        Raises RemoteError if obstore or a key is missing, or the endpoint is refused. Nothing is connected yet.
        """
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as err:
            raise RemoteError(f"a bucket for bytes needs obstore: {to_add('remote')}", lasting=True) from err
        self.what, self.mark = f"the bucket {address.name}", mark
        self._client, self._failures = obstore, (obstore.exceptions.BaseError, OSError, ValueError)
        access = _access(address.keyfile)
        plain = access.endpoint.startswith("http:")  # to this computer

        def store(seconds: float, silent_s: float | None = None) -> S3Store:
            client: dict[str, Any] = {"timeout": timedelta(seconds=seconds), "allow_http": plain}
            client |= {"connect_timeout": timedelta(seconds=_CONNECT_S), "allow_invalid_certificates": False}
            if silent_s is not None:
                client["read_timeout"] = timedelta(seconds=silent_s)
            if access.certificates is not None:
                client["root_certificate"] = access.certificates
            if plain:  # no proxy of the environment: it may be another computer. One must be named to leave it out
                client |= {"proxy_url": access.endpoint, "proxy_excludes": str(urlsplit(access.endpoint).hostname)}
            return S3Store(
                address.bucket,
                prefix=address.prefix or None,
                config={
                    "endpoint": access.endpoint,
                    "aws_endpoint_url_s3": access.endpoint,
                    "region": access.region,
                    "virtual_hosted_style_request": False,
                    "disable_bulk_delete": True,
                },
                client_options=client,  # type: ignore[arg-type]
                # a request that got no answer in time is not sent again, but one with an error of the server is
                retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=(silent_s or seconds) / 2)},
                credential_provider=lambda: access.credentials,  # type: ignore[arg-type]
            )

        try:
            self._quick, self._writing = store(ANSWER_S), store(PIECE_S)
            self._reading = store(PIECE_S, ANSWER_S)
        except self._failures:
            raise RemoteError(f"{self.what} cannot be used: its settings are invalid", lasting=True) from None
        self._closed, self._away_until = False, 0.0  # monotonic s

    def close(self) -> None:
        """Begin no request from now on. Those that run end by themselves, within PIECE_S."""
        self._closed = True

    def prepare(self, *, create: bool, of: str) -> None:
        """Look if the bucket is the one of a database. create: make an empty one it. Raises RemoteError."""
        found = self._mark()
        if found is None:
            if not create:
                raise RemoteError(f"{self.what} holds no packs of the remote any more: is it another one?")
            with self._errors():
                others = any(one["path"] != self.mark for one in islice(self._listed(None), 2))
                if not others:
                    with contextlib.suppress(self._client.exceptions.AlreadyExistsError):  # of another machine
                        self._put_small(self.mark, packs.mark_of(of))
            found = self._mark()
            if found is None:
                said = f"{self.what} is not of a remote, and not empty: name another prefix, s3://bucket/prefix"
                raise RemoteError(said, lasting=True)
        check_mark(found, of, self.what)

    def _mark(self) -> bytes | None:
        """Return the mark; None without one. Raises RemoteError."""
        with self._errors():
            try:
                found = self._client.get(self._quick, self.mark)
                return b"" if found.meta["size"] > MAX_MARK else self._read(found, MAX_MARK)
            except FileNotFoundError as err:
                if _code_of(err) == "NoSuchBucket":
                    raise
                return None

    def there(self, name: str) -> bool:
        """Return True if there is a pack of this name. Its bytes are checked when they are read."""
        key = _key(name)
        with self._errors():
            return self._head(key) is not None

    def put(self, parts: Sequence[bytes | memoryview]) -> str:
        """Keep a pack, given in parts, durably. Returns its name. One that is there is written again.

        So it is whole, and young: its row comes next, and `sweep` takes old ones.
        """
        name, nbytes = name_of(parts), sum(map(len, parts))
        key = _key(name)
        with self._errors():
            new = self._head(key) is None  # a bucket that is silent is found out here
            if nbytes > WHOLE:
                pieces = _pieces(parts, PART_BYTES)
                self._client.put(
                    self._writing, key, pieces, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=_AT_ONCE
                )
            else:
                with contextlib.suppress(self._client.exceptions.AlreadyExistsError):  # of another machine, just now
                    mode: Any = "create" if new else "overwrite"
                    self._client.put(self._writing, key, b"".join(parts), mode=mode, use_multipart=False)
        return name

    def get(self, name: str, nbytes: int) -> bytes:
        """Return a pack of so many bytes. Raises InvalidTurn if it is not there, or not what its name says."""
        key, what, data = _key(name), f"the pack {name[:12]!r} of the remote", bytearray()
        with self._errors():
            while len(data) < nbytes:
                at = len(data)
                try:
                    found = self._client.get(self._reading, key, options={"range": (at, min(at + WHOLE, nbytes))})
                except self._failures as err:
                    if _code_of(err) == "InvalidRange":
                        raise InvalidTurn(f"{what} has {at} bytes at most, its row says {nbytes}") from None
                    if not isinstance(err, FileNotFoundError) or _code_of(err) == "NoSuchBucket":
                        raise
                    raise InvalidTurn(f"{what} is not there") from None
                size = found.meta["size"]
                if size != nbytes:
                    raise InvalidTurn(f"{what} has {size} bytes, its row says {nbytes}")
                data += self._read(found, nbytes - at)
                if len(data) == at:
                    raise InvalidTurn(f"{what} ends after {at} bytes, its row says {nbytes}")
        pack = bytes(data)
        if len(pack) != nbytes or digest_of(pack) != name:
            raise InvalidTurn(f"{what} is not what its name says: it was altered")
        return pack

    def _read(self, found: Any, most: int) -> bytes:
        """Read the body of an answer, and a little more than `most` bytes at most, whatever its head says."""
        data = bytearray()
        for chunk in found.stream(1 << 20):
            self._go_on()
            data += chunk
            if len(data) > most:
                break
        return bytes(data)

    def names(self) -> list[tuple[str, int]]:
        """List the packs that are whole, by name and size in bytes."""
        with self._errors():
            found = [(_name(one["path"]), one["size"]) for one in self._listed("packs")]
        return sorted((name, size) for name, size in found if PACK.fullmatch(name))  # no clock

    def remove(self, name: str) -> None:
        """Remove a pack that no row names any more, if it is there."""
        key = _key(name)
        with self._errors():
            self._delete(key)

    def sweep(self, named: Callable[[], Collection[str | None]], *, dry_run: bool = False) -> tuple[int, int]:
        """Remove packs that no row names and that are older than SWEPT_S. Returns how many, and their bytes.

        Those are left by a kill between a pack and its row. Parts of a pack that was not sent whole are no objects,
        and stay: the client cannot list them. named: reads the packs that rows name.
        """
        count, nbytes = 0, 0
        with self._errors():
            clock = f"packs/{PART}{secrets.token_hex(8)}"
            self._put_small(clock, b"")
            now = self._client.head(self._quick, clock)["last_modified"]  # by the bucket's own clock
            self._delete(clock)

            def old(one: ObjectMeta) -> bool:
                return (now - one["last_modified"]).total_seconds() > packs.SWEPT_S

            # before the rows are read
            found = [(one["path"], one["size"]) for one in self._listed("packs") if _name(one["path"]) and old(one)]
        rows = named()
        with self._errors():
            for key, size in found:
                if _name(key) in rows:
                    continue
                if not dry_run:
                    again = self._head(key)
                    if again is None or not old(again):  # another machine put it again meanwhile
                        continue
                    self._delete(key)
                count, nbytes = count + 1, nbytes + size
        return count, nbytes

    def _listed(self, below: str | None) -> Iterator[ObjectMeta]:
        """Yield what the bucket has below the prefix, a page for each request."""
        every = (one for page in self._client.list(self._quick, below, chunk_size=_PAGE) for one in page)
        for one in islice(every, MAX_NAMES):
            self._go_on()
            yield one

    def _head(self, key: str) -> ObjectMeta | None:
        try:
            return self._client.head(self._quick, key)
        except FileNotFoundError:
            return None

    def _put_small(self, key: str, data: bytes) -> None:
        self._client.put(self._quick, key, data, mode="create", use_multipart=False)

    def _delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._client.delete(self._quick, key)

    def _go_on(self) -> None:
        if self._closed:
            raise RemoteError(f"{self.what} was closed")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        self._go_on()
        if (left := self._away_until - time.monotonic()) > 0:
            raise RemoteError(f"{self.what} did not answer just now; it is asked again in {left:.0f} s")
        try:
            yield
        except self._failures as err:
            self._fail(err)

    def _fail(self, err: Exception) -> NoReturn:
        """Raise an error in words, without what the client and the bucket say: that may have a key."""
        said, code = str(err), _code_of(err)
        silent = lasting = False
        if code:
            why = _WORDS.get(code, f"it answers {code}")
            lasting = code in _WORDS and why != "it is full"
        elif isinstance(err, FileNotFoundError):
            why = "an object is not there any more"
        elif isinstance(
            err, self._client.exceptions.PermissionDeniedError | self._client.exceptions.UnauthenticatedError
        ):
            why, lasting = _WORDS["AccessDenied"], True
        elif isinstance(err, self._client.exceptions.InvalidPathError):
            why = "it has an object that is not of a remote, with a name such as `a//b`: remove it"
        elif "InvalidCertificate" in said:
            why, lasting = "its certificate is not one that is trusted here: name its authority in AWS_CA_BUNDLE", True
        elif "kind: Timeout" in said or "source: TimedOut" in said:
            why, silent = "it did not answer in time", True
        elif "kind: Connect" in said:
            why, silent = "it cannot be reached", True
        else:
            why = f"the answer cannot be used ({type(err).__name__})"
        if silent:
            self._away_until = time.monotonic() + AWAY_S
        full = why == "it is full"
        raise RemoteError(f"{self.what} cannot be used: {why}", lasting=lasting, refused=full) from None


def _key(name: str) -> str:
    """Return the key of a pack, below the prefix. Raises InvalidTurn if it is not the name of one."""
    return f"{folder_of(name)}/{name}"


def _name(key: str) -> str:
    """Return the name of a pack by its key, or that of a clock which a kill left; "" for any other key."""
    name = key.rpartition("/")[2]
    ours = (PACK.fullmatch(name) and key == _key(name)) or (name.startswith(PART) and key == f"packs/{name}")
    return name if ours else ""


def _pieces(parts: Sequence[bytes | memoryview], most: int) -> Iterator[memoryview]:
    """Yield parts in pieces of `most` bytes at most: of a larger one the client would send all at once."""
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), most):
            yield view[at : at + most]


def _code_of(err: Exception) -> str:
    """Return the code that S3 names in an error, such as NoSuchKey; "" without one."""
    found = _CODE.search(str(err))
    return found[1] if found else ""


def _access(keyfile: Path | None) -> _Access:
    """Read the endpoint, the region and the keys of a bucket. Raises RemoteError, without a key."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _REGION
    if not re.fullmatch("[A-Za-z0-9-]{1,64}", region):
        raise RemoteError("AWS_REGION is not the name of a region, such as eu-central-1", lasting=True)
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = _checked(named) if named else f"https://s3.{region}.amazonaws.com"
    certificates = None
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        try:
            with open(bundle, "rb") as file:
                certificates = file.read(_MAX_FILE)
        except OSError as err:
            raise RemoteError(f"AWS_CA_BUNDLE {bundle} cannot be read: {err.strerror}", lasting=True) from err
    return _Access(endpoint, region, _keys_of(os.environ) if keyfile is None else _keys_in(keyfile), certificates)


def _checked(endpoint: str) -> str:
    """Return the URL of an endpoint. Raises RemoteError, without the URL, if it has a key or is sent in the clear."""
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise RemoteError("AWS_ENDPOINT_URL is not a URL", lasting=True) from None
    if parts.scheme not in ("http", "https") or not host:
        raise RemoteError("AWS_ENDPOINT_URL is not a URL such as https://s3.example", lasting=True)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise RemoteError("AWS_ENDPOINT_URL has more than https://, a host, a port and a path", lasting=True)
    if parts.scheme == "http" and not is_here(host):
        raise RemoteError(
            f"AWS_ENDPOINT_URL leads to {host} by http://, where others could read all: use https://", lasting=True
        )
    return endpoint.rstrip("/")


def _keys_in(file: Path) -> dict[str, Any]:
    """Read keys from a file as ~/.aws/credentials, the profile of AWS_PROFILE. Raises RemoteError, without its text."""
    profile = os.environ.get("AWS_PROFILE") or "default"
    try:
        found = configparser.RawConfigParser()
        found.read_string(read_secret(file, _MAX_FILE).decode())
        its = {name.upper(): value for name, value in found[profile].items()}
    except PermissionError as err:
        said = f"{err}: make it yours alone with `chmod 600 {file}`" if err.errno is None else f"{file} cannot be read"
        raise RemoteError(f"the keys of the bucket: {said}", lasting=True) from None
    except OSError as err:
        raise RemoteError(f"the keys of the bucket: {file} cannot be read: {err.strerror}", lasting=True) from None
    except (configparser.Error, ValueError, KeyError):
        raise RemoteError(
            f"the keys of the bucket: {file} is no file as ~/.aws/credentials with a section [{profile[:40]}]",
            lasting=True,
        ) from None
    return _keys_of(its)


def _keys_of(found: Any) -> dict[str, Any]:
    key, secret = found.get("AWS_ACCESS_KEY_ID"), found.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        raise RemoteError(
            "the bucket's keys are missing: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a file as "
            "~/.aws/credentials, of mode 0600, with `&keyfile=FILE`",
            lasting=True,
        )
    token = found.get("AWS_SESSION_TOKEN") or None
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
