"""TLS on the client's side, from the certificate authorities that the client trusts."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from ludus.proto.errors import ConfigError


def ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """Build a context that verifies HTTPS and WSS servers; None trusts the system's authorities.

    Raises:
        ConfigError: the file cannot be read or contains no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise _bad_ca_file_error(ca_file, error) from error


def grpc_credentials(ca_file: str | None) -> grpc.ChannelCredentials:
    """Build credentials that verify gRPC servers; None trusts the authorities built into gRPC.

    Raises:
        ConfigError: the file cannot be read or contains no certificate.
    """
    if ca_file is None:
        return grpc.ssl_channel_credentials()
    ssl_context(ca_file)  # raises a clear error; gRPC would only report a failed handshake
    return grpc.ssl_channel_credentials(root_certificates=Path(ca_file).read_bytes())


def _bad_ca_file_error(ca_file: str | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"ca_file = {ca_file} must contain certificates in PEM form: {error};"
        " give the authority that signed the server's certificate"
    )
