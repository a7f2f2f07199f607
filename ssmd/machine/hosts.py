"""Names of hosts, addresses and origins, as settings and requests write them."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_HOSTNAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?")
_APP_ORIGIN = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]{0,31}://[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|file://")


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host's IP address; None if the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def place_of(host: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address. Other texts, such as a process, are unchanged."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a process
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    link = "" if address.scope_id is None else f"%{address.scope_id}"
    return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64{link}"


def is_hostname(name: str) -> bool:
    """Return True if a text can be the name of a host."""
    # A dotted number that is not an address is a typing error, not a name.
    return _HOSTNAME.fullmatch(name) is not None and not re.fullmatch(r"[0-9.]+", name)


def bracketed(host: str) -> str:
    """Write a host as a Host header does: IPv6 in brackets, lower case."""
    return f"[{host}]" if ":" in host else host.lower().rstrip(".")


def origin(text: str) -> str:
    """Return an origin as browsers write it. Apps and extensions have their own schemes (`app://obsidian.md`).

    Raises ValueError, which gives examples.
    """
    if "*" in text:
        raise ValueError(f"{text!r} has a star for a part of an origin; name each origin, or use '*' alone for all")
    if _APP_ORIGIN.fullmatch(text):
        return text
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        bare = parts.scheme in ("http", "https") and parts.path in ("", "/")
        bare = bare and (address(host) is not None or is_hostname(host))
        port = parts.port
    except ValueError:
        host, bare, port = "", False, None
    if not bare or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r} is not an origin; expected for example 'https://chat.example', 'app://name' or '*'")
    shown = "" if port in (None, {"http": 80, "https": 443}[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{bracketed(host)}{shown}"
