"""The Ray cluster that RAY_ADDRESS names, and a check that a cluster responds there.

Ray waits for minutes for an address where nothing, or something else, responds.
"""

from __future__ import annotations

import os
import subprocess
import sys

from ray._private.services import canonicalize_bootstrap_address

from ludus.proto.errors import ConfigError

ADDRESS_VARIABLE = "RAY_ADDRESS"
_LOCAL = "local"
_CLIENT_SCHEME = "ray://"
_TIMEOUT_S = 10
"""Time limit in seconds for the cluster to respond. A head that restarts needs a few seconds."""
_PROCESS_TIMEOUT_S = _TIMEOUT_S + 15

_PROBE = """
import os, sys, grpc
address, timeout_s = sys.argv[1], float(sys.argv[2])
options = [("grpc.enable_http_proxy", 0)]
channel = grpc.insecure_channel(address, options)
call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
try:
    call(b"", timeout=timeout_s, wait_for_ready=True)
except grpc.RpcError as error:
    sys.stdout.write(error.code().name)
sys.stdout.flush()
os._exit(0)
"""
"""Program that prints the status of a call to Ray's control store; nothing if it succeeds.

It is a separate process, because Ray forks and must be started before this process uses gRPC.
"""
_REASONS = {
    "DEADLINE_EXCEEDED": "nothing responds there",
    "UNAVAILABLE": "nothing responds there",
    "UNIMPLEMENTED": "another program responds there",
}
"""Reasons by status. Any other status, such as a missing token, is the response of a cluster."""


def is_local() -> bool:
    """Return whether a run starts Ray on this machine only, because RAY_ADDRESS is not set."""
    return get_address() == _LOCAL


def get_address() -> str:
    """Return the value of RAY_ADDRESS, or "local"."""
    return os.environ.get(ADDRESS_VARIABLE) or _LOCAL


def check_cluster() -> None:
    """Check that a Ray cluster responds at RAY_ADDRESS.

    Raises:
        ConfigError: nothing responds, or the variable is not the address of a cluster.
    """
    if get_address().startswith(_CLIENT_SCHEME):
        raise make_address_error("a run cannot use Ray Client; give host:port of the head node")
    try:
        address = canonicalize_bootstrap_address(get_address())
    except Exception as error:  # Ray and the resolver raise several classes
        raise make_address_error(str(error)) from error
    if address is None or _uses_tls():
        return
    command = [sys.executable, "-c", _PROBE, address, str(_TIMEOUT_S)]
    try:
        probe = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROCESS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise make_address_error(_REASONS["DEADLINE_EXCEEDED"]) from None
    if probe.stdout in _REASONS:
        raise make_address_error(_REASONS[probe.stdout])


def make_address_error(reason: str) -> ConfigError:
    """Return the error for an address where no cluster can be used."""
    return ConfigError(
        f"{ADDRESS_VARIABLE} = '{get_address()}': no Ray cluster can be used: {reason}; start the "
        f"cluster, correct {ADDRESS_VARIABLE}, or unset it to run on this machine alone"
    )


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
