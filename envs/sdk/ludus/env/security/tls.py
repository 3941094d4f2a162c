"""TLS of servers, from files that may be replaced while they run.

    cert, key, client_ca --stat at each new connection--> changed? --check--> new handshakes
                                                             |
                                                             +-- unusable: the old ones stay

Connections that are open keep what they were made with. There is no watching task: files are
looked at when somebody connects, which is the only time that they matter.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ludus.env.security import client_tls
from ludus.proto.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of one side of a connection."""

    cert: Path
    """The certificate, followed by those between it and the authority."""
    key: Path
    """The certificate's private key, without a passphrase."""
    client_ca: Path | None = None
    """Authorities whose certificates clients must show; None asks for none."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file."""
        return (self.cert, self.key, *([self.client_ca] if self.client_ca else []))


def server_ssl_context(files: TlsFiles) -> ssl.SSLContext:
    """For HTTPS: uvicorn.Config(ssl_context_factory=lambda config, default: context).

    Raises:
        ConfigError: a file is missing or unusable, or key and certificate are no pair.
    """
    current = _Current(files, _load_context)
    context = _load_context(files)

    def use_current(connection: Any, server_name: str | None, asked: ssl.SSLContext) -> None:
        # Called within each handshake, before the certificate is sent.
        connection.context = current.get()

    context.sni_callback = use_current
    return context


def grpc_server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For grpc.aio: server.add_secure_port(address, credentials).

    Raises:
        ConfigError: a file is missing or unusable, or key and certificate are no pair.
    """
    current = _Current(files, _load_grpc_configuration)
    # gRPC calls it at each new connection, from threads of its own.
    return grpc.dynamic_ssl_server_credentials(
        current.get(), current.get_if_new, files.client_ca is not None
    )


def client_ssl_context(
    ca_file: Path | None = None, identity: TlsFiles | None = None
) -> ssl.SSLContext:
    """For HTTPS and WSS clients.

    Args:
        ca_file: who may have signed the server's certificate; None trusts the system's.
        identity: what the client shows to a server that asks for certificates.

    Raises:
        ConfigError: a file is missing or unusable, or key and certificate are no pair.
    """
    context = client_tls.ssl_context(str(ca_file) if ca_file else None)
    if identity is not None:
        _load_pair(context, identity)
    return context


def client_channel_credentials(
    ca_file: Path | None = None, identity: TlsFiles | None = None
) -> grpc.ChannelCredentials:
    """For gRPC clients; the arguments are those of `client_ssl_context`.

    Raises:
        ConfigError: a file is missing or unusable, or key and certificate are no pair.
    """
    if identity is None:
        return client_tls.grpc_credentials(str(ca_file) if ca_file else None)
    client_ssl_context(ca_file, identity)  # gRPC reports bad files only as failed handshakes
    return grpc.ssl_channel_credentials(
        root_certificates=_read(ca_file, "ca_file") if ca_file else None,
        private_key=_read(identity.key, "key"),
        certificate_chain=_read(identity.cert, "cert"),
    )


class _Current:
    """What was made of the files when they were last usable; safe from any thread."""

    def __init__(self, files: TlsFiles, load: Callable[[TlsFiles], Any]) -> None:
        self._files = files
        self._load = load
        self._lock = threading.Lock()
        self._signature = file_signatures(files.paths)
        self._value = load(files)

    def get(self) -> Any:
        """The newest usable value."""
        self.get_if_new()
        return self._value

    def get_if_new(self) -> Any:
        """The newest usable value, or None when it is the one that was returned before."""
        with self._lock:
            signature = file_signatures(self._files.paths)
            if signature == self._signature:
                return None
            self._signature = signature
            try:
                value = self._load(self._files)
            except ConfigError as error:
                _log.error("the TLS certificate stays as it was: %s", error)
                return None
            if file_signatures(self._files.paths) != signature:
                return None  # written to meanwhile: the next connection looks again
            self._value = value
            _log.info("new TLS certificate from %s", self._files.cert)
            return value


def _load_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, files)
    if files.client_ca is not None:
        _load_authorities(context, files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session would skip the client's certificate, also a revoked one.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def _load_grpc_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    _load_context(files)  # gRPC says nothing about bad files until a handshake fails
    return grpc.ssl_server_certificate_configuration(
        [(_read(files.key, "key"), _read(files.cert, "cert"))],
        root_certificates=_read(files.client_ca, "client_ca") if files.client_ca else None,
    )


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    _require_pem(files.cert, "cert", "CERTIFICATE")
    _require_pem(files.key, "key", "PRIVATE KEY")
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"expected the private key of the certificate {files.cert}, got another one in"
                f" {files.key}; give the two that were issued together"
            ) from None
        raise ConfigError(
            f"expected a certificate in {files.cert} and its private key in {files.key}, got"
            f" {error.reason or error}; write both in PEM form"
        ) from None


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    _require_pem(path, "client_ca", "CERTIFICATE")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(
            f"expected certificates in client_ca, got {error.reason or error} in {path};"
            " give the authorities that signed your clients' certificates, in PEM form"
        ) from None


def _no_password() -> str:
    raise ConfigError(
        "expected a private key without a passphrase, got an encrypted one; decrypt it with:"
        " openssl pkey -in KEY -out KEY.decrypted"
    )


def _require_pem(path: Path, field: str, kind: str) -> None:
    content = _read(path, field)
    if b"-----BEGIN " not in content or f"{kind}-----".encode() not in content:
        raise ConfigError(
            f"expected a PEM file with a {kind} as {field}, got something else in {path};"
            " name the right file"
        )


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"expected a PEM file as {field}, got {error.strerror} for {path};"
            " create it or name another"
        ) from error


def file_signatures(paths: Iterable[Path]) -> tuple[Any, ...]:
    """What changes when a file is written, replaced, or its symbolic link is turned."""
    found: list[Any] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            found.append(error.errno)
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
