"""Address and credentials of an API server, from a pod's service account or a kubeconfig.

The official client reads kubeconfig files with contexts, certificates, exec plugins and OIDC. A pod
needs only an address, a CA file and a token file, so the client is not imported there. The token
file is read before each request, because the kubelet replaces it about every hour.
"""

from __future__ import annotations

import os
import re
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ludus.proto.errors import ConfigError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CURRENT_CONTEXT_PATTERN = re.compile(r"""current-context["']?[ \t]*:[ \t]*["']?[^\s"'#,}]""")
"""Pattern of a current context with a name, in a kubeconfig in YAML or JSON."""


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """The address and credentials of an API server."""

    url: str
    read_authorization: Callable[[], str] = field(repr=False)
    """Function that returns the Authorization header; '' sends none. It may read a file or run a
    plugin, so it is called in a thread, before each request."""
    tls: ssl.SSLContext | None = None
    tls_server_name: str = ""
    """Name to expect in the server's certificate; empty means the host of the address."""
    proxy: str = field(default="", repr=False)
    namespace: str = ""
    """Default namespace; empty if unknown."""


def has_current_context() -> bool:
    """Return whether a default kubeconfig seems to name a current context.

    Nothing is imported for this, so that commands for which a cluster is optional start quickly.
    """
    default_file = os.path.join("~", ".kube", "config")
    paths = (os.environ.get("KUBECONFIG") or default_file).split(os.pathsep)
    for path in filter(None, paths):
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):  # no such file, or no home folder
            continue
        if _CURRENT_CONTEXT_PATTERN.search(text):
            return True
    return False


def load_access(kubeconfig: Path | None = None, context: str = "") -> ApiAccess:
    """Load the access to a cluster.

    A kubeconfig or context is used if one is named. Otherwise a pod uses its service account, and
    other processes use the default kubeconfig.

    Raises:
        ConfigError: the access cannot be read.
    """
    if kubeconfig is None and not context and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return load_pod_access()
    return load_kubeconfig_access(kubeconfig, context)


def load_pod_access(folder: Path = _ACCOUNT, environ: Mapping[str, str] = os.environ) -> ApiAccess:
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
        read_authorization=lambda: f"Bearer {token_file.read_text(encoding='utf-8').strip()}",
        tls=tls,
        namespace=namespace.strip(),
    )


def load_kubeconfig_access(path: Path | None = None, context: str = "") -> ApiAccess:
    """Load the access that a context of a kubeconfig describes.

    The default file is $KUBECONFIG, or ~/.kube/config if that is not set.

    Raises:
        ConfigError: the file or the context cannot be read.
    """
    # Imported here because the import takes a third of a second, and a pod does not need it.
    import yaml
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config

    configuration = Configuration()
    try:
        # The client itself reads KUBECONFIG only when it is imported.
        config_file = os.environ.get("KUBECONFIG") if path is None else str(path)
        load_kube_config(config_file, context or None, configuration)
        contexts, current_context = list_kube_config_contexts(config_file)
        tls = _make_tls_context(configuration)
    except (ConfigException, OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        # A parser's message may quote a line with a token, so only the error's type is shown.
        is_harmless = isinstance(error, ConfigException | OSError)
        raise ConfigError(
            f"cannot read the kubeconfig at {path or 'KUBECONFIG or ~/.kube/config'}:"
            f" {error if is_harmless else type(error).__name__};"
            " see: kubectl config get-contexts"
        ) from (error if is_harmless else None)
    context_by_name = {kube_context["name"]: kube_context for kube_context in contexts}
    selected_context = context_by_name.get(context, current_context)
    host = urlsplit(configuration.host).hostname or ""
    exclusions = {"no": configuration.no_proxy or ""}
    bypasses_proxy = urllib.request.proxy_bypass_environment(host, exclusions)  # type: ignore[attr-defined]

    def read_authorization() -> str:
        # This call also renews an expired token.
        try:
            token_settings = configuration.auth_settings().get("BearerToken")
        except ConfigException as error:
            raise ConfigError(f"cannot get credentials from the kubeconfig: {error}") from error
        return str(token_settings["value"] or "") if token_settings else ""

    return ApiAccess(
        url=configuration.host.rstrip("/"),
        read_authorization=read_authorization,
        tls=tls,
        tls_server_name=configuration.tls_server_name or "",
        proxy="" if bypasses_proxy else configuration.proxy or "",
        namespace=str(selected_context["context"].get("namespace") or ""),
    )


def _make_tls_context(configuration: Any) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if configuration.cert_file:
        tls.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls
