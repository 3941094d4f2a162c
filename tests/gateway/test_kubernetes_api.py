"""Credentials, errors and watches of the Kubernetes API client."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import trustme
import yaml
from aiohttp import web

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes import api as kubernetes_api
from ludus.services.kubernetes.access import (
    ApiAccess,
    load_access,
    load_kubeconfig_access,
    load_pod_access,
)
from ludus.services.kubernetes.api import EventType, KubernetesApi, make_resource_path
from tests.env.polling import wait_until
from tests.gateway.cluster_objects import NAMESPACE, make_api_client, make_endpoint_slice, member
from tests.gateway.fake_kubernetes import FakeKubernetes

PODS_PATH = make_resource_path("v1", NAMESPACE, "pods")
SECRET = "sec.ret.token"


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def cluster(authority: trustme.CA) -> AsyncIterator[FakeKubernetes]:
    """Run a fake cluster with TLS that accepts one token."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "kubernetes.default.svc").configure_cert(tls)
    async with FakeKubernetes(tls=tls) as cluster:
        cluster.tokens = {SECRET}
        yield cluster


@pytest.fixture
def account_folder(tmp_path: Path, authority: trustme.CA) -> Path:
    """Create a pod's service account folder."""
    (tmp_path / "token").write_text(f"{SECRET}\n")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    return tmp_path


def make_pod_environ(cluster: FakeKubernetes) -> dict[str, str]:
    port = cluster.url.rpartition(":")[2]
    return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}


def make_pod_client(cluster: FakeKubernetes, account_folder: Path) -> KubernetesApi:
    return KubernetesApi(lambda: load_pod_access(account_folder, make_pod_environ(cluster)))


async def test_pod_service_account_is_accepted(
    cluster: FakeKubernetes, account_folder: Path
) -> None:
    async with make_pod_client(cluster, account_folder) as api:
        assert (await api.read(PODS_PATH))["items"] == []


async def test_rotated_token_is_reloaded(cluster: FakeKubernetes, account_folder: Path) -> None:
    async with make_pod_client(cluster, account_folder) as api:
        await api.read(PODS_PATH)
        cluster.tokens = {"the.next.token"}
        (account_folder / "token").write_text("the.next.token")
        await api.read(PODS_PATH)
    assert [request.token for request in cluster.requests] == [SECRET, "the.next.token"]


async def test_requests_succeed_after_missing_account_files_are_restored(
    cluster: FakeKubernetes, account_folder: Path
) -> None:
    async with make_pod_client(cluster, account_folder) as api:
        await api.read(PODS_PATH)
        token_file = account_folder / "token"
        token_file.rename(account_folder / "away")
        with pytest.raises(ClusterError, match="No such file"):
            await api.read(PODS_PATH)
        cluster.tokens = {"the.next.token"}
        token_file.write_text("stale")
        (account_folder / "ca.crt").rename(account_folder / "ca.away")
        with pytest.raises(ClusterError, match="automountServiceAccountToken"):
            await api.read(PODS_PATH)
        token_file.write_text("the.next.token")
        (account_folder / "ca.away").rename(account_folder / "ca.crt")
        await api.read(PODS_PATH)


async def test_rotated_ca_is_reloaded(account_folder: Path) -> None:
    old_ca, new_ca = trustme.CA(), trustme.CA()
    old_ca.cert_pem.write_to_path(account_folder / "ca.crt")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    new_ca.issue_cert("127.0.0.1").configure_cert(tls)
    async with FakeKubernetes(tls=tls) as cluster, make_pod_client(cluster, account_folder) as api:
        with pytest.raises(ClusterError, match="certificate verify failed"):
            await api.read(PODS_PATH)
        assert cluster.requests == [], "client sent a request to an unverified server"
        new_ca.cert_pem.write_to_path(account_folder / "ca.crt")
        await api.read(PODS_PATH)


async def test_errors_logs_and_reprs_contain_no_credentials(
    cluster: FakeKubernetes, account_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    access = load_pod_access(account_folder, make_pod_environ(cluster))
    texts = [repr(access)]
    cluster.tokens = {"another"}
    async with make_pod_client(cluster, account_folder) as api:
        for call in (api.read(PODS_PATH), api.merge(f"{PODS_PATH}/a", {})):
            with pytest.raises(ClusterError, match="check the service account's token") as error:
                await call
            texts += [str(error.value), repr(error.value)]
        await cluster.go_down()
        with pytest.raises(ClusterError) as error:
            await api.read(PODS_PATH)
        texts += [str(error.value), repr(error.value)]
    assert SECRET not in "".join(texts) + caplog.text


async def test_redirect_is_not_followed() -> None:
    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(other_cluster.url + request.path)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    api = KubernetesApi(lambda: ApiAccess(url, lambda: f"Bearer {SECRET}"))
    async with FakeKubernetes() as other_cluster, api:
        with pytest.raises(ClusterError, match=r"refused GET .*307"):
            await api.read(PODS_PATH)
        assert other_cluster.requests == []
    await runner.cleanup()


def write_kubeconfig(path: Path, cluster: FakeKubernetes, ca_file: Path, user: object) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [
            {
                "name": "c",
                "cluster": {"server": cluster.url, "certificate-authority": str(ca_file)},
            }
        ],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


async def test_kubeconfig_works_outside_a_pod(
    cluster: FakeKubernetes, account_folder: Path
) -> None:
    ca_file = account_folder / "ca.crt"
    config = write_kubeconfig(account_folder / "config", cluster, ca_file, {"token": SECRET})
    async with KubernetesApi(lambda: load_access(config)) as api:
        assert (await api.read(PODS_PATH))["items"] == []
    assert SECRET not in repr(load_kubeconfig_access(config))


async def test_kubeconfig_plugin_runs_again_after_a_refused_token(
    cluster: FakeKubernetes, account_folder: Path
) -> None:
    response_file = account_folder / "response.json"
    plugin = account_folder / "plugin"
    plugin.write_text(f"#!/bin/sh\ncat {response_file}\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    version = "client.authentication.k8s.io/v1"

    def write_response(token: str) -> None:
        status = {"token": token}
        credential = {"apiVersion": version, "kind": "ExecCredential", "status": status}
        response_file.write_text(json.dumps(credential))

    write_response(SECRET)
    user = {"exec": {"apiVersion": version, "command": str(plugin), "interactiveMode": "Never"}}
    config = write_kubeconfig(account_folder / "config", cluster, account_folder / "ca.crt", user)
    async with KubernetesApi(lambda: load_kubeconfig_access(config)) as api:
        await api.read(PODS_PATH)
        cluster.tokens = {"fresh"}
        write_response("fresh")
        await api.read(PODS_PATH)
    assert [request.token for request in cluster.requests] == [SECRET, SECRET, "fresh"]


@pytest.mark.parametrize("missing_file", ["token", "ca.crt"])
def test_missing_service_account_error_has_a_remedy(
    account_folder: Path, missing_file: str
) -> None:
    (account_folder / missing_file).unlink()
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        load_pod_access(account_folder, environ)


def test_missing_kubeconfig_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kubectl config get-contexts"):
        load_kubeconfig_access(tmp_path / "missing")
    (tmp_path / "broken").write_text("{{{ token: sec.ret.token")
    with pytest.raises(ConfigError, match=": ParserError") as error:
        load_kubeconfig_access(tmp_path / "broken")
    assert error.value.__cause__ is None


def test_ipv6_address_in_url_has_brackets(account_folder: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert load_pod_access(account_folder, environ).url == "https://[fd00::1]:443"


def test_resource_names_are_escaped_in_paths() -> None:
    assert make_resource_path("v1", "a/b", "pods", "../x") == "/api/v1/namespaces/a%2Fb/pods/..%2Fx"
    assert make_resource_path("a.b/v1", "n", "leases") == "/apis/a.b/v1/namespaces/n/leases"


async def test_refusal_error_has_remedy_or_retry_delay() -> None:
    async with FakeKubernetes() as cluster, make_api_client(cluster) as api:
        cluster.fail(403)
        with pytest.raises(ClusterError, match=r"cannot list pods.*grant it in the gateway's Role"):
            await api.read(PODS_PATH)
        cluster.fail(429, retry_after="7")
        with pytest.raises(ClusterError) as error:
            await api.read(PODS_PATH)
        assert (error.value.status, error.value.retry_after_s) == (429, 7.0)


async def test_oversized_response_or_event_raises_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes_api, "MAX_RESPONSE_BYTES", 2_000)
    monkeypatch.setattr(kubernetes_api, "MAX_EVENT_BYTES", 2_000)
    path = make_resource_path("discovery.k8s.io/v1", NAMESPACE, "endpointslices")
    async with FakeKubernetes() as cluster, make_api_client(cluster) as api:
        version = (await api.read(path))["metadata"]["resourceVersion"]
        cluster.put(make_endpoint_slice("s1", *(member(f"pod-{n}") for n in range(500))))
        with pytest.raises(ClusterError, match="larger than 2000 bytes"):
            await api.read(path)
        with pytest.raises(ClusterError, match=r"watch event .* larger than 2000"):
            async with aclosing(api.watch(path, version=version, timeout_s=60)) as events:
                await anext(events)


async def test_server_ends_the_watch_when_the_client_closes() -> None:
    path = make_resource_path("discovery.k8s.io/v1", NAMESPACE, "endpointslices")
    async with FakeKubernetes() as cluster, make_api_client(cluster) as api:
        cluster.put(make_endpoint_slice("s1"))
        async with aclosing(api.watch(path, version="0", timeout_s=60)) as events:
            event = await anext(events)
            assert event.type == EventType.ADDED
            assert cluster.num_watches == 1
        await wait_until(lambda: cluster.num_watches == 0)


@pytest.mark.slow
async def test_watch_ends_with_a_bookmark_at_the_timeout() -> None:
    async with FakeKubernetes(revision=500) as cluster, make_api_client(cluster) as api:
        events = [event async for event in api.watch(PODS_PATH, version="500", timeout_s=1)]
    assert [event.type for event in events] == [EventType.BOOKMARK]
    assert events[0].object["metadata"]["resourceVersion"] == "500"


async def test_request_to_an_unresponsive_server_times_out() -> None:
    async with FakeKubernetes() as cluster:
        cluster.delay_s = 60.0
        access = ApiAccess(cluster.url, lambda: "")
        async with KubernetesApi(lambda: access, timeout_s=0.1) as api:
            with pytest.raises(ClusterError, match="TimeoutError"):
                await asyncio.wait_for(api.read(PODS_PATH), 60)


@pytest.mark.slow
def test_a_gateway_in_a_pod_does_not_load_the_official_client() -> None:
    modules = "source, leadership, deletion_cost"
    code = (
        f"import sys\nfrom ludus.services.gateway.kubernetes import {modules}\n"
        "print([m for m in ('kubernetes', 'torch', 'ray') if m in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout.strip() == "[]", process.stderr
