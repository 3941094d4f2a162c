"""Exemption of loopback addresses from the proxies that environment variables name.

Clients of HTTP send requests for every host to the proxy of HTTP_PROXY, also for the endpoint of
this process, which no proxy can reach.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_VARIABLES = ("NO_PROXY", "no_proxy")
"""Both spellings; if both are set, some clients read only the second one."""
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def exempt_loopback(variables: MutableMapping[str, str], *hosts: str | None) -> None:
    """Add loopback and `hosts` to the hosts that clients reach without a proxy."""
    texts = [variables.get(name, "") for name in _VARIABLES]
    exempt_hosts = [host.strip() for host in ",".join(texts).split(",")]
    exempt_hosts += [host or "" for host in (*_LOOPBACK_HOSTS, *hosts)]
    for name in _VARIABLES:
        variables[name] = ",".join(dict.fromkeys(filter(None, exempt_hosts)))
