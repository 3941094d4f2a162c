"""TLS on the client's side: which certificate authorities a server's certificate may come from."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from ludus.proto.errors import ConfigError


def ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """What verifies a server over HTTPS and WSS; None trusts the system's authorities.

    Raises:
        ConfigError: the file cannot be read or holds no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(ca_file, error) from error


def grpc_credentials(ca_file: str | None) -> grpc.ChannelCredentials:
    """The same for gRPC; None trusts the authorities that gRPC brings along.

    Raises:
        ConfigError: the file cannot be read or holds no certificate.
    """
    if ca_file is None:
        return grpc.ssl_channel_credentials()
    ssl_context(ca_file)  # gRPC itself reports a bad file only as a failed handshake
    return grpc.ssl_channel_credentials(root_certificates=Path(ca_file).read_bytes())


def _unusable(ca_file: str | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"expected a ca_file with certificates in PEM form, got {ca_file}: {error};"
        " give the authority that signed the server's certificate"
    )
