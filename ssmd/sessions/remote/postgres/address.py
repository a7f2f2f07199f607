"""The address of a remote in PostgreSQL: a URL of libpq without a password, and the place for bytes beside it.

    postgresql://user@host/database?packs=/mnt/nas/packs
    postgresql://user@host/database?packs=s3://bucket/prefix

The password comes from PGPASSWORD, from ~/.pgpass, or from the file that `passfile` names. All that leaves this
computer goes over TLS, to a server whose certificate names it: a machine in between could read everything else.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ssmd.sessions.remote.remote import RemoteError

SCHEMES = ("postgresql", "postgres")
# Parameters of libpq that a URL may have, beside user, host, port and database.
PARAMETERS = (
    *("host", "port", "user", "dbname", "passfile", "connect_timeout", "target_session_attrs", "channel_binding"),
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl"),
)
CONNECT_S = "3"  # s, unless the URL says otherwise
_SURE = "verify-full"
_BUCKET = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9_.-]+){0,16})/?")
_OWN = ("packs", "keyfile")  # parameters that libpq does not have


@dataclass(frozen=True)
class BucketAddress:
    """A bucket, and the prefix of the keys in it; "" for none. keyfile: a file with the bucket's keys."""

    bucket: str
    prefix: str
    keyfile: Path | None

    @property
    def name(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True)
class Address:
    """A server and a database. name: of both, for messages. parameters: of libpq.

    packs: the folder or the bucket for bytes.
    """

    name: str
    parameters: dict[str, str]
    packs: Path | BucketAddress | None


def is_address(remote: str) -> bool:
    """Return True if the setting names a database, and not a folder."""
    return remote.partition("://")[0].lower() in SCHEMES


def read_address(url: str) -> Address:
    """Read the URL of a remote. Raises RemoteError, without the URL where it may have a password."""
    try:
        parts = urlsplit(url)
        password, given = (
            parts.password,
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)),
        )
    except ValueError as err:
        raise _wrong("it is not a URL") from err
    if password is not None or any(name in ("password", "sslpassword") for name, _ in given):
        raise _wrong(
            "it has a password, which other users could read in the list of processes: set PGPASSWORD, or name a file "
            "of mode 0600 with `?passfile=FILE`, as ~/.pgpass is"
        )
    if parts.fragment:
        raise _wrong("it has a `#`: write it as %23")
    found = dict[str, str]()
    for name, value in given:
        if name not in (*_OWN, *PARAMETERS):
            raise _wrong(f"the parameter {name[:40]!r} is not known; there are: {', '.join((*_OWN, *PARAMETERS))}")
        found[name] = value
    packs = _read_packs(found.pop("packs", None), found.pop("keyfile", None))
    try:
        named = {"user": parts.username, "host": parts.hostname, "port": parts.port, "dbname": parts.path[1:]}
    except ValueError as err:
        raise _wrong("its port is not a number") from err
    found = {name: unquote(str(value)) for name, value in named.items() if value} | found
    for name in ("port", "connect_timeout"):
        if not found.get(name, "0").replace(",", "").isdecimal():  # a port for each host
            raise _wrong(f"`{name}` is {found[name][:40]!r}, which is not a number")
    if not found.get("dbname"):
        raise _wrong("it names no database: postgresql://user@host/database")
    at = found.get("host", "")
    name = f"postgresql://{at if not at.startswith('/') else ''}/{found['dbname']}"
    return Address(name, found, packs)


def _read_packs(value: str | None, keyfile: str | None) -> Path | BucketAddress | None:
    """Read the place for bytes. Raises RemoteError, without what may have a key."""
    if value is not None and ":" in value and not Path(value).is_absolute():  # of whatever kind, it may have a key
        match = _BUCKET.fullmatch(value)
        prefix = match[2].strip("/") if match else ""
        if match is None or any(not part.strip(".") for part in prefix.split("/") if prefix):
            raise _wrong(
                "`packs` is not a bucket such as s3://bucket/prefix, without a key: keys come from AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY, or from `keyfile`, and its server from AWS_ENDPOINT_URL"
            )
        if keyfile is not None and not Path(keyfile).is_absolute():
            raise _wrong(f"`keyfile` is {keyfile!r}: name a file from the root on")
        return BucketAddress(match[1], prefix, None if keyfile is None else Path(keyfile))
    if keyfile is not None:
        raise _wrong("`keyfile` is for a bucket: packs=s3://bucket/prefix")
    if value is not None and not Path(value).is_absolute():
        raise _wrong(f"`packs` is {value!r}: name a folder from the root on, or s3://bucket/prefix")
    return None if value is None else Path(value)


def _wrong(why: str) -> RemoteError:
    return RemoteError(f"the address of the remote is invalid: {why}", lasting=True)


def with_tls(parameters: dict[str, str], defaults: dict[str, str]) -> dict[str, Any]:
    """Return the parameters of a connection. Beyond this computer it is encrypted, to a server that is checked.

    defaults: those that libpq takes from the environment. Raises RemoteError if less is asked for.
    """
    asked = defaults | parameters
    hosts = [one for name in ("host", "hostaddr") for one in asked.get(name, "").split(",") if one]
    done: dict[str, Any] = {"connect_timeout": CONNECT_S, "application_name": "ssmd", "tcp_user_timeout": "10000"}
    done["client_encoding"] = "utf8"  # else that of the database, and of one in SQL_ASCII text comes as bytes
    done |= parameters
    if all(is_here(host) for host in hosts):
        return done
    mode = parameters.get("sslmode", _SURE)
    if mode != _SURE:
        raise _wrong(
            f"sslmode={mode} does not check that the server is the one that is named: beyond this computer it is "
            f"{_SURE}, with the server's certificate authority in `sslrootcert=FILE`, unless the system knows it"
        )
    if "sslrootcert" not in asked and not os.path.exists(os.path.expanduser("~/.postgresql/root.crt")):
        done["sslrootcert"] = "system"
    return done | {"sslmode": _SURE, "gssencmode": "disable"}


def is_here(host: str) -> bool:
    """Return True for a socket and for addresses of loopback."""
    if host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
