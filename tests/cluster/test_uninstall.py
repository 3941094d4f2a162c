"""Uninstallation of a release with every kind of object that this cluster supports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.gateway_client import connect_client
from tests.cluster.installed import (
    CHART,
    Release,
    create_namespace,
    find_skip_reason,
    helm,
    kubectl,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
VOLATILE_KINDS = ("events", "componentstatuses", "certificatesigningrequests")
"""Kinds whose objects appear and disappear without the release."""
COLUMNS = "KIND:.kind,NAMESPACE:.metadata.namespace,NAME:.metadata.name"
SANDBOXES = "sandboxes"
"""Name of the environment of mode sandbox."""
PARENT_REFS = [{"name": "edge"}]
VALUES: dict[str, Any] = {
    "image": {"tag": "dev"},
    "auth": {"existingSecret": "ludus-auth"},
    "gateway": {
        "drainSeconds": 1,
        "resources": {"requests": {"cpu": "20m"}},
        "autoscaling": {"enabled": True, "minReplicas": 1},
    },
    "environmentDefaults": {
        "image": {"repository": "ludus/env-openspiel"},
        "package": "openspiel_env",
        "options": {"game": "blackjack"},
        "drainSeconds": 1,
        "resources": {"requests": {"cpu": "20m", "memory": "128Mi"}},
    },
    "environments": {"blackjack": {"maxUnavailable": 1}},
    # The pods of Ray need not run.
    "runs": {"image": {"tag": "absent"}, "autoscaling": {"enabled": True}},
    "rayCluster": {"enabled": True},
    "storage": {
        "runs": {"keep": False, "size": "1Gi"},
        "weights": {"kind": "s3"},
        "s3": {"existingSecret": "ludus-s3"},
        "store": {"enabled": True, "size": "1Gi", "image": {"tag": "absent"}},
    },
    "ingress": {"enabled": True, "host": "ludus.example.com"},
}
VALUES_BY_CRD: dict[str, dict[str, Any]] = {
    "podmonitors.monitoring.coreos.com": {
        "monitoring": {
            "monitors": {"enabled": True},
            "rules": {"enabled": True},
            "dashboards": {"enabled": True},
        }
    },
    "scaledobjects.keda.sh": {
        "environments": {"blackjack": {"autoscaling": {"kind": "keda", "min": 1}}}
    },
    "sandboxwarmpools.extensions.agents.x-k8s.io": {
        "environments": {SANDBOXES: {"mode": "sandbox", "capacity": 1, "sandbox": {"warmPool": 1}}}
    },
    "httproutes.gateway.networking.k8s.io": {
        "httpRoute": {"enabled": True, "parentRefs": PARENT_REFS}
    },
    "grpcroutes.gateway.networking.k8s.io": {
        "grpcRoute": {"enabled": True, "parentRefs": PARENT_REFS}
    },
}


async def test_uninstall_leaves_no_object_in_the_cluster(tmp_path: Path) -> None:
    values = [VALUES, *find_optional_values()]
    paths = [tmp_path / f"{index}.json" for index in range(len(values))]
    for path, part in zip(paths, values, strict=True):
        path.write_text(json.dumps(part), encoding="utf-8")
    wait_until(lambda: "Terminating" not in kubectl("get", "namespaces"), "deleted namespaces")
    with create_namespace() as namespace:
        objects = list_all_objects()
        release = Release("ludus", namespace)
        options = [option for path in paths for option in ("--values", str(path))]
        helm("install", release.name, str(CHART), "-n", namespace, *options)
        for name in ("ludus-gateway", "ludus-env-blackjack"):
            rollout = ("rollout", "status", f"deployment/{name}", "--timeout=300s")
            kubectl("-n", namespace, *rollout)
        environments = {name for part in values for name in part.get("environments", ())}
        if SANDBOXES in environments:
            pool = (f"sandboxwarmpool/ludus-env-{SANDBOXES}", "--timeout=300s")
            kubectl("-n", namespace, "wait", *pool, "--for=jsonpath={.status.readyReplicas}=1")
        for environment in environments:
            async with connect_client(release, environment) as client:
                session, _ = await client.open()
                await session.close()
        kinds = {entry[0] for entry in list_all_objects() - objects}
        assert {"NetworkPolicy", "PersistentVolumeClaim", "RayCluster"} <= kinds
        helm("uninstall", release.name, "-n", namespace)
        wait_until(lambda: not list_all_objects() - objects, "all objects to be deleted")
        assert list_all_objects() == objects


def find_optional_values() -> list[dict[str, Any]]:
    """Return the values for the kinds of the installed operators."""
    crds = {name.partition("/")[2] for name in kubectl("get", "crd", "-o", "name").split()}
    return [values for crd, values in VALUES_BY_CRD.items() if crd in crds]


def list_all_objects() -> set[tuple[str, ...]]:
    """Return the kind, namespace and name of every object, with and without a namespace."""
    names = kubectl("api-resources", "--verbs=list", "-o", "name").split()
    kinds = [
        name
        for name in names
        if name.partition(".")[0] not in VOLATILE_KINDS and "metrics.k8s.io" not in name
    ]
    options = ("--all-namespaces", "--no-headers", "-o", f"custom-columns={COLUMNS}")
    lines = kubectl("get", ",".join(kinds), *options).splitlines()
    return {tuple(line.split()) for line in lines}
