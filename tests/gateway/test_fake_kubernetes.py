"""Compatibility of the fake API server with the official Kubernetes client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, watch

from tests.gateway.fake_kubernetes import Call, run_cluster_in_thread

RAY_JOBS = ("ray.io", "v1", "arena", "rayjobs")


def make_ray_job(name: str, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, **metadata},
        "spec": {"entrypoint": "python -m ludus.trainer", "suspend": False},
    }


@pytest.fixture
def cluster() -> Iterator[tuple[client.ApiClient, Call]]:
    with run_cluster_in_thread() as (url, call):
        configuration = client.Configuration(host=url)
        with client.ApiClient(configuration) as api_client:
            yield api_client, call


@pytest.fixture
def jobs_api(cluster: tuple[client.ApiClient, Call]) -> client.CustomObjectsApi:
    return client.CustomObjectsApi(cluster[0])


def get_error_status(method: Any, *arguments: Any, **options: Any) -> int:
    with pytest.raises(client.ApiException) as error:
        method(*arguments, **options)
    return error.value.status


@pytest.mark.slow
def test_objects_support_create_read_list_update_and_delete(
    jobs_api: client.CustomObjectsApi,
) -> None:
    created_job = jobs_api.create_namespaced_custom_object(
        *RAY_JOBS, make_ray_job("one", labels={"run": "a"})
    )
    assert created_job["metadata"]["generation"] == 1
    assert (
        get_error_status(jobs_api.create_namespaced_custom_object, *RAY_JOBS, make_ray_job("one"))
        == 409
    )
    jobs_api.create_namespaced_custom_object(*RAY_JOBS, make_ray_job("two", labels={"run": "b"}))
    job_list = jobs_api.list_namespaced_custom_object(*RAY_JOBS, label_selector="run=a")
    assert [job["metadata"]["name"] for job in job_list["items"]] == ["one"]

    created_job["spec"]["suspend"] = True
    updated_job = jobs_api.replace_namespaced_custom_object(*RAY_JOBS, "one", created_job)
    assert updated_job["metadata"]["generation"] == 2
    assert (
        get_error_status(jobs_api.replace_namespaced_custom_object, *RAY_JOBS, "one", created_job)
        == 409
    )

    jobs_api.delete_namespaced_custom_object(*RAY_JOBS, "one")
    assert get_error_status(jobs_api.get_namespaced_custom_object, *RAY_JOBS, "one") == 404


@pytest.mark.slow
def test_patch_removes_null_fields_and_keeps_the_status(
    cluster: tuple[client.ApiClient, Call], jobs_api: client.CustomObjectsApi
) -> None:
    _, call = cluster
    job = make_ray_job("one", namespace="arena")
    call(lambda cluster: cluster.put({**job, "status": {"jobStatus": "RUNNING"}}))
    patch = {"spec": {"suspend": None}, "status": {"jobStatus": "FORGED"}}
    patched_job = jobs_api.patch_namespaced_custom_object(
        *RAY_JOBS, "one", patch, _content_type="application/merge-patch+json"
    )
    assert patched_job["spec"] == {"entrypoint": "python -m ludus.trainer"}
    assert patched_job["status"] == {"jobStatus": "RUNNING"}
    status_patch = {"status": {"jobStatus": "SUCCEEDED"}}
    patched_job = jobs_api.patch_namespaced_custom_object_status(
        *RAY_JOBS, "one", status_patch, _content_type="application/merge-patch+json"
    )
    assert patched_job["status"] == {"jobStatus": "SUCCEEDED"}


def test_object_is_deleted_when_the_finalizer_is_removed(
    jobs_api: client.CustomObjectsApi,
) -> None:
    jobs_api.create_namespaced_custom_object(
        *RAY_JOBS, make_ray_job("one", finalizers=["ray.io/cleanup"])
    )
    jobs_api.delete_namespaced_custom_object(*RAY_JOBS, "one")
    deleted_job = jobs_api.get_namespaced_custom_object(*RAY_JOBS, "one")
    assert deleted_job["metadata"]["deletionTimestamp"]
    deleted_job["metadata"]["finalizers"] = []
    jobs_api.replace_namespaced_custom_object(*RAY_JOBS, "one", deleted_job)
    assert get_error_status(jobs_api.get_namespaced_custom_object, *RAY_JOBS, "one") == 404


def test_watch_reports_objects_that_enter_or_leave_the_selection(
    cluster: tuple[client.ApiClient, Call], jobs_api: client.CustomObjectsApi
) -> None:
    _, call = cluster

    def put(name: str, run: str) -> None:
        job = make_ray_job(name, namespace="arena", labels={"run": run})
        call(lambda cluster: cluster.put(job))

    put("old", "a")
    received_events: list[tuple[str, str]] = []

    def listen() -> None:
        events = watch.Watch().stream(
            jobs_api.list_namespaced_custom_object,
            *RAY_JOBS,
            label_selector="run=a",
            timeout_seconds=60,
        )
        for event in events:
            received_events.append((event["type"], event["object"]["metadata"]["name"]))
            if len(received_events) == 5:
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
    assert received_events == [
        ("ADDED", "old"),
        ("ADDED", "new"),
        ("MODIFIED", "old"),
        ("DELETED", "old"),
        ("DELETED", "new"),
    ]


def test_typed_objects_of_the_official_client_are_accepted(
    cluster: tuple[client.ApiClient, Call],
) -> None:
    api_client, _ = cluster
    leases_api = client.CoordinationV1Api(api_client)
    spec = client.V1LeaseSpec(holder_identity="me", lease_duration_seconds=15)
    lease = client.V1Lease(metadata=client.V1ObjectMeta(name="gateway"), spec=spec)
    lease.api_version, lease.kind = "coordination.k8s.io/v1", "Lease"
    created_lease = leases_api.create_namespaced_lease("arena", lease)
    assert created_lease.spec.holder_identity == "me"
    assert created_lease.metadata.resource_version
    assert [lease.metadata.name for lease in leases_api.list_namespaced_lease("arena").items] == [
        "gateway"
    ]
