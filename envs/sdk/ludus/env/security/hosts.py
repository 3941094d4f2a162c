"""Host names of this machine, and the checks of `host` and `origin` headers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

_HOST_HEADER = re.compile(r"(\[[^\[\]]+\]|[^:\[\]@/?#\s]+)(?::[0-9]{0,5})?")
"""Name or address, and optional port, of a `host` header."""


def is_loopback_name(name: str) -> bool:
    """Return True for `localhost` and for addresses that only this machine can reach."""
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped_address = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped_address is not None and mapped_address.is_loopback)


def is_allowed_host(host_header: str, allowed_hosts: Collection[str]) -> bool:
    """Return True if a `host` header names loopback or one of the allowed hosts, with any port."""
    match = _HOST_HEADER.fullmatch(host_header)
    if match is None:
        return False
    name = match.group(1).strip("[]").lower()
    return is_loopback_name(name) or name in {host.strip("[]").lower() for host in allowed_hosts}


def is_loopback_origin(origin: str) -> bool:
    """Return True if an `origin` header names a web page of this machine."""
    try:
        return is_loopback_name(urlsplit(origin).hostname or "")
    except ValueError:
        return False
