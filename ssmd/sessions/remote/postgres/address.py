"""The address of a remote in PostgreSQL: a URL of libpq without a password, and the folder for bytes beside it.

    postgresql://user@host/database?packs=/mnt/nas/packs

The password comes from PGPASSWORD, from ~/.pgpass, or from the file that `passfile` names. All that leaves this
computer goes over TLS, to a server whose certificate names it: a machine in between could read everything else.
"""

from __future__ import annotations

import ipaddress
import os
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


@dataclass(frozen=True)
class Address:
    """A server and a database. name: of both, for messages. parameters: of libpq. packs: the folder for bytes."""

    name: str
    parameters: dict[str, str]
    packs: Path | None


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
    found, packs = dict[str, str](), None
    for name, value in given:
        if name == "packs":
            packs = Path(value)
        elif name in PARAMETERS:
            found[name] = value
        else:
            raise _wrong(f"the parameter {name[:40]!r} is not known; there are: {', '.join(('packs', *PARAMETERS))}")
    if packs is not None and not packs.is_absolute():
        raise _wrong(f"`packs` is {str(packs)!r}: name a folder from the root on")
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
    if all(_is_here(host) for host in hosts):
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


def _is_here(host: str) -> bool:
    """Return True for a socket and for addresses of loopback."""
    if host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
