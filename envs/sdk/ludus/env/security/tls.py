"""TLS of servers and clients; a server's files may be replaced while it runs.

    cert, key, client_ca --stat at each new connection--> changed? --check--> new handshakes
                                                             |
                                                             +-- unusable: keep the old files

Open connections keep their certificate. The files are checked when a client connects, so no
background task is needed.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ludus.env.security.secret_files import read_file_signatures
from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server, or of a client that identifies itself."""

    cert: Path
    """Certificate, followed by the intermediate certificates."""
    key: Path
    """Private key of the certificate, without a passphrase."""
    client_ca: Path | None = None
    """Authorities of client certificates; None requests no client certificate."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, expand_home(getattr(self, name)))

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return (self.cert, self.key, *([self.client_ca] if self.client_ca else []))


def build_server_context(files: TlsFiles) -> ssl.SSLContext:
    """Build the context of an HTTPS server, for uvicorn's `ssl_context_factory`.

    Raises:
        ConfigError: a file is missing or unusable, or key and certificate do not match.
    """
    credentials = _ReloadingCredentials(files, _load_context)
    context = _load_context(files)

    def update_context(connection: Any, server_name: str | None, _: ssl.SSLContext) -> None:
        # OpenSSL calls this within each handshake, before it sends the certificate.
        connection.context = credentials.load_current()

    context.sni_callback = update_context
    return context


def build_server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Build the credentials of a gRPC server; raises the errors of `build_server_context`."""
    credentials = _ReloadingCredentials(files, _load_grpc_configuration)
    # gRPC calls this at each new connection, from its own threads.
    return grpc.dynamic_ssl_server_credentials(
        credentials.load_current(), credentials.load_if_changed, files.client_ca is not None
    )


def build_client_context(
    ca_file: Path | None = None, identity: TlsFiles | None = None
) -> ssl.SSLContext:
    """Build the context of an HTTPS or WSS client.

    Args:
        ca_file: trusted authorities of servers; None trusts the system's authorities.
        identity: certificate that the client sends to a server that requests one.

    Raises:
        ConfigError: a file is missing or unusable, or key and certificate do not match.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ca_file = {ca_file} must contain certificates in PEM form: {error};"
            " give the authority that signed the server's certificate"
        ) from error
    if identity is not None:
        _load_certificate(context, identity)
    return context


def build_channel_credentials(
    ca_file: Path | None = None, identity: TlsFiles | None = None
) -> grpc.ChannelCredentials:
    """Build the credentials of a gRPC client; see `build_client_context`."""
    if ca_file or identity:
        build_client_context(ca_file, identity)  # gRPC reports bad files only as failed handshakes
    return grpc.ssl_channel_credentials(
        root_certificates=_read(ca_file, "ca_file") if ca_file else None,
        private_key=_read(identity.key, "key") if identity else None,
        certificate_chain=_read(identity.cert, "cert") if identity else None,
    )


class _ReloadingCredentials:
    """Credentials that are loaded again when their files change; safe from any thread."""

    def __init__(self, files: TlsFiles, load: Callable[[TlsFiles], Any]) -> None:
        self._files = files
        self._load = load
        self._lock = threading.Lock()
        self._file_signatures = read_file_signatures(files.paths)
        self._credentials = load(files)

    def load_current(self) -> Any:
        self.load_if_changed()
        return self._credentials

    def load_if_changed(self) -> Any:
        """Return new credentials if the files have changed and are usable; otherwise None."""
        with self._lock:
            signatures = read_file_signatures(self._files.paths)
            if signatures == self._file_signatures:
                return None
            self._file_signatures = signatures
            try:
                credentials = self._load(self._files)
            except ConfigError as error:
                _log.error("the new TLS files cannot be used, the old certificate stays: %s", error)
                return None
            if read_file_signatures(self._files.paths) != signatures:
                return None  # a file changed during the load; the next connection tries again
            self._credentials = credentials
            _log.info("new TLS certificate from %s", self._files.cert)
            return credentials


def _load_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, files)
    if files.client_ca is not None:
        _load_authorities(context, files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session would skip the client certificate, even a revoked one.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def _load_grpc_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    _load_context(files)  # gRPC reports bad files only as failed handshakes
    return grpc.ssl_server_certificate_configuration(
        [(_read(files.key, "key"), _read(files.cert, "cert"))],
        root_certificates=_read(files.client_ca, "client_ca") if files.client_ca else None,
    )


def _load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    _require_pem(files.cert, "cert", "CERTIFICATE")
    _require_pem(files.key, "key", "PRIVATE KEY")
    try:
        # Without a password, OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(files.cert, files.key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"the private key in {files.key} does not belong to the certificate {files.cert};"
                " give the two that were issued together"
            ) from None
        raise ConfigError(
            f"cannot load the certificate {files.cert} and its private key {files.key}:"
            f" {error.reason or error}; write both in PEM form"
        ) from None


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    _require_pem(path, "client_ca", "CERTIFICATE")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(
            f"client_ca = {path} must contain certificates, got {error.reason or error};"
            " give the authorities that signed your clients' certificates, in PEM form"
        ) from None


def _refuse_passphrase() -> str:
    raise ConfigError(
        "the private key must not have a passphrase; decrypt it with:"
        " openssl pkey -in KEY -out KEY.decrypted"
    )


def _require_pem(path: Path, field: str, pem_label: str) -> None:
    content = _read(path, field)
    if b"-----BEGIN " not in content or f"{pem_label}-----".encode() not in content:
        raise ConfigError(
            f"{field} = {path} must be a PEM file with a {pem_label}, but contains none;"
            " give the path of one that does"
        )


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{field} = {path} must be a readable PEM file, got {error.strerror};"
            " create it or name another"
        ) from error
