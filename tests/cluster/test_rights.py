"""Rights of a gateway's service account: it may change one annotation of its servers' pods."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.access import ApiAccess
from ludus.services.kubernetes.api import KubernetesApi, make_resource_path
from tests.cluster.autoscaling import COST_ANNOTATION
from tests.cluster.installed import (
    AUTOSCALING_VALUES,
    Release,
    find_skip_reason,
    install,
    kubectl,
)
from tests.cluster.prometheus import has_prometheus

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
ACCOUNT = "ludus-gateway"
FOREIGN_POD = "foreign"
COST_PATCH = {"metadata": {"annotations": {COST_ANNOTATION: "7"}}}
REFUSED_PATCHES: tuple[dict[str, Any], ...] = (
    {"metadata": {"labels": {"app.kubernetes.io/component": "gateway"}}},
    {"metadata": {"labels": {"extra": "label"}}},
    {"metadata": {"labels": {"ludus.dev/environment": None}}},
    {"metadata": {"annotations": {"example.com/extra": "annotation"}}},
    {"metadata": {"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": None}}},
    {"metadata": {"annotations": {COST_ANNOTATION: "7", "example.com/extra": "annotation"}}},
    {"metadata": {"finalizers": ["example.com/stay"]}},
    {"metadata": {"ownerReferences": None}},
    {"spec": {"activeDeadlineSeconds": 1}},
)


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    if not has_prometheus():
        pytest.skip("SKIPPED, NOT PASSED: no Prometheus operator is installed")
    scaling = {"kind": "hpa", "min": "1"}
    settings = {
        f"environments.blackjack.autoscaling.{name}": value for name, value in scaling.items()
    }
    with install(AUTOSCALING_VALUES, settings) as release:
        yield release


@pytest_asyncio.fixture
async def api(release: Release) -> AsyncIterator[KubernetesApi]:
    """Return a client with the token of the gateway's service account."""
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    cluster = config["clusters"][0]["cluster"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    token = kubectl("-n", release.namespace, "create", "token", ACCOUNT).strip()
    access = ApiAccess(
        url=cluster["server"],
        read_authorization=lambda: f"Bearer {token}",
        tls=ssl.create_default_context(cadata=authority),
    )
    async with KubernetesApi(lambda: access) as api:
        yield api


def find_pod(release: Release, component: str) -> dict[str, Any]:
    """Return a pod of a component."""
    label = f"app.kubernetes.io/component={component}"
    pod: dict[str, Any] = release.get("pods", "-l", label)["items"][0]
    return pod


def make_pod_path(release: Release, name: str) -> str:
    """Return the API path of a pod."""
    return make_resource_path("v1", release.namespace, "pods", name)


async def find_refusal(api: KubernetesApi, path: str, patch: dict[str, Any]) -> str:
    """Return the message with which the API server refuses a patch; '' if it accepts the patch."""
    try:
        await api.merge(path, patch)
    except ClusterError as error:
        return error.message
    return ""


async def test_a_gateway_may_set_the_deletion_cost_of_a_server(
    release: Release, api: KubernetesApi
) -> None:
    path = make_pod_path(release, find_pod(release, "environment")["metadata"]["name"])
    pod = await api.merge(path, COST_PATCH)
    assert pod["metadata"]["annotations"][COST_ANNOTATION] == "7"
    pod = await api.merge(path, {"metadata": {"annotations": {COST_ANNOTATION: None}}})
    assert COST_ANNOTATION not in pod["metadata"]["annotations"]


async def test_a_gateway_may_change_no_other_field_of_a_server(
    release: Release, api: KubernetesApi
) -> None:
    pod = find_pod(release, "environment")
    container = {**pod["spec"]["containers"][0], "image": "docker.io/ludus/gateway:dev"}
    spec_patches = (
        {"spec": {"containers": [container]}},
        {"spec": {"tolerations": [*pod["spec"]["tolerations"], {"operator": "Exists"}]}},
    )
    path = make_pod_path(release, pod["metadata"]["name"])
    for patch in (*REFUSED_PATCHES, *spec_patches):
        assert "a gateway may only change" in await find_refusal(api, path, patch), patch
    for subresource in ("status", "ephemeralcontainers", "resize"):
        refusal = await find_refusal(api, f"{path}/{subresource}", COST_PATCH)
        assert "forbidden" in refusal, subresource
    unchanged_pod = find_pod(release, "environment")
    assert unchanged_pod["metadata"]["labels"] == pod["metadata"]["labels"]
    assert unchanged_pod["spec"] == pod["spec"]


async def test_a_gateway_may_not_change_other_pods(release: Release, api: KubernetesApi) -> None:
    server = find_pod(release, "environment")
    labels = {**server["metadata"]["labels"], "app.kubernetes.io/instance": "another"}
    spec = {key: server["spec"][key] for key in ("containers", "volumes", "securityContext")}
    metadata = {"name": FOREIGN_POD, "namespace": release.namespace, "labels": labels}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    kubectl("create", "-f", "-", stdin=json.dumps(manifest))
    for name in (find_pod(release, "gateway")["metadata"]["name"], FOREIGN_POD):
        refusal = await find_refusal(api, make_pod_path(release, name), COST_PATCH)
        assert "a gateway may only change pods of its environments" in refusal, name


async def test_a_gateway_has_no_other_right(release: Release, api: KubernetesApi) -> None:
    pod_path = make_pod_path(release, find_pod(release, "environment")["metadata"]["name"])
    secret_path = make_resource_path("v1", release.namespace, "secrets", "ludus-auth")
    deployment_path = make_resource_path(
        "apps/v1", release.namespace, "deployments", "ludus-env-blackjack"
    )
    for request in (api.read(pod_path), api.delete(pod_path), api.read(secret_path)):
        with pytest.raises(ClusterError) as caught:
            await request
        assert caught.value.status == 403
    assert "forbidden" in await find_refusal(api, deployment_path, COST_PATCH)
