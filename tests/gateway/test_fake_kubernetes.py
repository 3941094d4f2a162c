"""The fake API server is compatible with the official client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, watch

from tests.gateway.fake_kubernetes import Call, cluster_in_thread

GROUP = ("ray.io", "v1", "arena", "rayjobs")


def ray_job(name: str, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, **metadata},
        "spec": {"entrypoint": "python -m ludus.trainer", "suspend": False},
    }


@pytest.fixture
def cluster() -> Iterator[tuple[client.ApiClient, Call]]:
    with cluster_in_thread() as (url, call):
        configuration = client.Configuration(host=url)
        with client.ApiClient(configuration) as api_client:
            yield api_client, call


@pytest.fixture
def jobs(cluster: tuple[client.ApiClient, Call]) -> client.CustomObjectsApi:
    return client.CustomObjectsApi(cluster[0])


def call_status(call: Any, *arguments: Any, **options: Any) -> int:
    with pytest.raises(client.ApiException) as caught:
        call(*arguments, **options)
    return caught.value.status


def test_an_object_is_created_read_listed_changed_and_deleted(
    jobs: client.CustomObjectsApi,
) -> None:
    made = jobs.create_namespaced_custom_object(*GROUP, ray_job("one", labels={"run": "a"}))
    assert made["metadata"]["generation"] == 1
    assert call_status(jobs.create_namespaced_custom_object, *GROUP, ray_job("one")) == 409
    jobs.create_namespaced_custom_object(*GROUP, ray_job("two", labels={"run": "b"}))
    listed = jobs.list_namespaced_custom_object(*GROUP, label_selector="run=a")
    assert [item["metadata"]["name"] for item in listed["items"]] == ["one"]

    made["spec"]["suspend"] = True
    changed = jobs.replace_namespaced_custom_object(*GROUP, "one", made)
    assert changed["metadata"]["generation"] == 2
    assert call_status(jobs.replace_namespaced_custom_object, *GROUP, "one", made) == 409

    jobs.delete_namespaced_custom_object(*GROUP, "one")
    assert call_status(jobs.get_namespaced_custom_object, *GROUP, "one") == 404


def test_a_patch_removes_what_is_null_and_leaves_the_status_alone(
    cluster: tuple[client.ApiClient, Call], jobs: client.CustomObjectsApi
) -> None:
    _, call = cluster
    stored = ray_job("one", namespace="arena")
    call(lambda cluster: cluster.put({**stored, "status": {"jobStatus": "RUNNING"}}))
    patch = {"spec": {"suspend": None}, "status": {"jobStatus": "FORGED"}}
    patched = jobs.patch_namespaced_custom_object(
        *GROUP, "one", patch, _content_type="application/merge-patch+json"
    )
    assert patched["spec"] == {"entrypoint": "python -m ludus.trainer"}
    assert patched["status"] == {"jobStatus": "RUNNING"}
    done = {"status": {"jobStatus": "SUCCEEDED"}}
    patched = jobs.patch_namespaced_custom_object_status(
        *GROUP, "one", done, _content_type="application/merge-patch+json"
    )
    assert patched["status"] == {"jobStatus": "SUCCEEDED"}


def test_an_object_with_a_finalizer_goes_when_it_is_removed(
    jobs: client.CustomObjectsApi,
) -> None:
    jobs.create_namespaced_custom_object(*GROUP, ray_job("one", finalizers=["ray.io/cleanup"]))
    jobs.delete_namespaced_custom_object(*GROUP, "one")
    doomed = jobs.get_namespaced_custom_object(*GROUP, "one")
    assert doomed["metadata"]["deletionTimestamp"]
    doomed["metadata"]["finalizers"] = []
    jobs.replace_namespaced_custom_object(*GROUP, "one", doomed)
    assert call_status(jobs.get_namespaced_custom_object, *GROUP, "one") == 404


def test_watch_reports_objects_that_enter_or_leave_the_selection(
    cluster: tuple[client.ApiClient, Call], jobs: client.CustomObjectsApi
) -> None:
    _, call = cluster

    def put(name: str, run: str) -> None:
        stored = ray_job(name, namespace="arena", labels={"run": run})
        call(lambda cluster: cluster.put(stored))

    put("old", "a")
    heard: list[tuple[str, str]] = []

    def listen() -> None:
        events = watch.Watch().stream(
            jobs.list_namespaced_custom_object, *GROUP, label_selector="run=a", timeout_seconds=60
        )
        for event in events:
            heard.append((event["type"], event["object"]["metadata"]["name"]))
            if len(heard) == 5:
                return

    listener = threading.Thread(target=listen)
    listener.start()
    while not call(lambda cluster: cluster.num_watches):
        assert listener.is_alive()
    put("new", "a")
    put("other", "b")
    put("old", "a")
    put("old", "b")
    call(lambda cluster: cluster.remove("ray.io/v1", "rayjobs", "arena", "new"))
    listener.join(60)
    assert heard == [
        ("ADDED", "old"),
        ("ADDED", "new"),
        ("MODIFIED", "old"),
        ("DELETED", "old"),
        ("DELETED", "new"),
    ]


def test_typed_objects_of_the_official_client_are_understood(
    cluster: tuple[client.ApiClient, Call],
) -> None:
    api_client, _ = cluster
    leases = client.CoordinationV1Api(api_client)
    spec = client.V1LeaseSpec(holder_identity="me", lease_duration_seconds=15)
    lease = client.V1Lease(metadata=client.V1ObjectMeta(name="gateway"), spec=spec)
    lease.api_version, lease.kind = "coordination.k8s.io/v1", "Lease"
    made = leases.create_namespaced_lease("arena", lease)
    assert made.spec.holder_identity == "me"
    assert made.metadata.resource_version
    assert [item.metadata.name for item in leases.list_namespaced_lease("arena").items] == [
        "gateway"
    ]
