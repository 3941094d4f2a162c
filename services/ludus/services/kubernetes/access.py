"""How an API server is reached, and as whom: from inside a pod, or by a kubeconfig.

The official client reads kubeconfig files (contexts, certificates, exec plugins, OIDC): that is
code nobody should write twice. In a pod it is not even imported: there, access is an address, a
CA file and a token file. The token file is read again before each request, because the kubelet
replaces it about hourly.
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
    """How to reach an API server, and as whom."""

    url: str
    authorization: Callable[[], str] = field(repr=False)
    """The Authorization header, empty for none. It may read a file or run a plugin, so it is
    called in a thread, before each request."""
    tls: ssl.SSLContext | None = None
    tls_server_name: str = ""
    """The name to expect in the server's certificate, where it is not the address."""
    proxy: str = field(default="", repr=False)
    namespace: str = ""
    """The namespace that it is meant for; empty where nothing says it."""


def load_access(kubeconfig: Path | None = None, context: str = "") -> ApiAccess:
    """The access of this pod, or that of a kubeconfig where one is named or there is no pod.

    Raises:
        ConfigError: neither can be read.
    """
    if kubeconfig is None and not context and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster_access()
    return kubeconfig_access(kubeconfig, context)


def in_cluster_access(
    folder: Path = _SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ
) -> ApiAccess:
    """The access that Kubernetes gives a pod.

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
            f"expected a service account in {folder}, got {type(error).__name__} ({error}); set"
            " automountServiceAccountToken on the pod, or name a kubeconfig"
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


def kubeconfig_access(path: Path | None = None, context: str = "") -> ApiAccess:
    """The access of a kubeconfig's context; KUBECONFIG or ~/.kube/config without a path.

    Raises:
        ConfigError: the file or the context cannot be read.
    """
    # Imported here because it costs a third of a second, which a pod would pay for nothing.
    import yaml
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config

    configuration = Configuration()
    try:
        # The client looks KUBECONFIG up once, when it is imported.
        file = os.environ.get("KUBECONFIG") if path is None else str(path)
        load_kube_config(
            config_file=file, context=context or None, client_configuration=configuration
        )
        contexts, current = list_kube_config_contexts(file)
        tls = _tls_of(configuration)
    except (ConfigException, OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        # What a parser says may quote a line of the file, and such lines hold tokens.
        is_harmless = isinstance(error, ConfigException | OSError)
        raise ConfigError(
            f"expected a kubeconfig at {path or 'KUBECONFIG or ~/.kube/config'}, got"
            f" {error if is_harmless else type(error).__name__};"
            " see: kubectl config get-contexts"
        ) from (error if is_harmless else None)
    chosen = next((one for one in contexts if one["name"] == context), current)
    host = urlsplit(configuration.host).hostname or ""
    direct = {"no": configuration.no_proxy or ""}
    is_direct = urllib.request.proxy_bypass_environment(host, direct)  # type: ignore[attr-defined]

    def authorization() -> str:
        # The configuration renews a token that expires each time that it is asked.
        try:
            settings = configuration.auth_settings().get("BearerToken")
        except ConfigException as error:
            raise ConfigError(f"expected credentials from the kubeconfig, got: {error}") from error
        return str(settings["value"] or "") if settings else ""

    return ApiAccess(
        url=configuration.host.rstrip("/"),
        authorization=authorization,
        tls=tls,
        tls_server_name=configuration.tls_server_name or "",
        proxy="" if is_direct else configuration.proxy or "",
        namespace=str(chosen["context"].get("namespace") or ""),
    )


def _tls_of(configuration: Any) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if configuration.cert_file:
        tls.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls
