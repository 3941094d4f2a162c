"""Address and credentials of an API server, from a pod's service account or a kubeconfig.

The official client reads kubeconfig files with contexts, certificates, exec plugins and OIDC. In a
pod it is not imported, because an address, a CA file and a token file are enough there. The token
file is read before each request, because the kubelet replaces it about every hour.
"""

from __future__ import annotations

import os
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ludus.proto.errors import ConfigError

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """The address and credentials of an API server."""

    url: str
    authorization: Callable[[], str] = field(repr=False)
    """Function that returns the Authorization header, empty for none. It may read a file or run a
    plugin, so a thread calls it before each request."""
    tls: ssl.SSLContext | None = None
    tls_server_name: str = ""
    """Expected name in the server's certificate; empty means the host of the address."""
    proxy: str = field(default="", repr=False)
    namespace: str = ""
    """Default namespace; empty if unknown."""


def load_access(kubeconfig: Path | None = None, context: str = "") -> ApiAccess:
    """Load the named kubeconfig or context; by default this pod's access, or the kubeconfig.

    Raises:
        ConfigError: the access cannot be read.
    """
    if kubeconfig is None and not context and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return load_pod_access()
    return load_kubeconfig_access(kubeconfig, context)


def load_pod_access(
    folder: Path = _SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ
) -> ApiAccess:
    """Load the access of this pod's service account.

    Raises:
        ConfigError: the address, the CA file or the token file is missing.
    """
    token_file, ca_file = folder / "token", folder / "ca.crt"
    try:
        host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
        token_file.read_bytes()
        tls = ssl.create_default_context(cafile=str(ca_file))
    except (KeyError, OSError) as error:
        raise ConfigError(
            f"cannot read the service account in {folder}: {type(error).__name__} ({error}); set"
            " automountServiceAccountToken on the pod, or use a kubeconfig"
        ) from error
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    namespace_file = folder / "namespace"
    namespace = namespace_file.read_text(encoding="utf-8") if namespace_file.exists() else ""
    return ApiAccess(
        url=f"https://{authority}",
        authorization=lambda: f"Bearer {token_file.read_text(encoding='utf-8').strip()}",
        tls=tls,
        namespace=namespace.strip(),
    )


def load_kubeconfig_access(path: Path | None = None, context: str = "") -> ApiAccess:
    """Load a context of a kubeconfig; the default path is KUBECONFIG or ~/.kube/config.

    Raises:
        ConfigError: the file or the context cannot be read.
    """
    # Imported here because the import takes a third of a second, and a pod does not need it.
    import yaml
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config

    configuration = Configuration()
    try:
        # The client reads KUBECONFIG only at import time.
        file = os.environ.get("KUBECONFIG") if path is None else str(path)
        load_kube_config(
            config_file=file, context=context or None, client_configuration=configuration
        )
        contexts, current = list_kube_config_contexts(file)
        tls = _make_tls_context(configuration)
    except (ConfigException, OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        # A parser's message may quote a line of the file with a token.
        is_harmless = isinstance(error, ConfigException | OSError)
        raise ConfigError(
            f"cannot read the kubeconfig at {path or 'KUBECONFIG or ~/.kube/config'}:"
            f" {error if is_harmless else type(error).__name__};"
            " see: kubectl config get-contexts"
        ) from (error if is_harmless else None)
    selected = next((entry for entry in contexts if entry["name"] == context), current)
    host = urlsplit(configuration.host).hostname or ""
    exclusions = {"no": configuration.no_proxy or ""}
    is_direct = urllib.request.proxy_bypass_environment(host, exclusions)  # type: ignore[attr-defined]

    def authorization() -> str:
        # The configuration renews an expired token in this call.
        try:
            settings = configuration.auth_settings().get("BearerToken")
        except ConfigException as error:
            raise ConfigError(f"cannot get credentials from the kubeconfig: {error}") from error
        return str(settings["value"] or "") if settings else ""

    return ApiAccess(
        url=configuration.host.rstrip("/"),
        authorization=authorization,
        tls=tls,
        tls_server_name=configuration.tls_server_name or "",
        proxy="" if is_direct else configuration.proxy or "",
        namespace=str(selected["context"].get("namespace") or ""),
    )


def _make_tls_context(configuration: Any) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if configuration.cert_file:
        tls.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls
