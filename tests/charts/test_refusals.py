"""Every mistake in values is refused with its place, what was expected, and what to set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.charts.rendering import ValueSet, over, template
from tests.charts.value_sets import BLACKJACK, LEAST, MONITORED, with_environment

pytestmark = pytest.mark.slow


def least(**values: Any) -> dict[str, Any]:
    """The least values, with others over them."""
    return over(LEAST, values)


def keda(**fields: Any) -> dict[str, Any]:
    """The environment scaled by KEDA."""
    return over(with_environment(autoscaling={"kind": "keda", **fields}), MONITORED)


def store(**s3: Any) -> dict[str, Any]:
    """Weights through the bundled store."""
    return least(storage={"weights": {"kind": "s3"}, "store": {"enabled": True}, "s3": s3})


SHAPES = [
    # What helm's own check of values.schema.json says.
    (least(gatway={}), "(root): Additional property gatway is not allowed"),
    (least(gateway={"replica": 3}), "gateway: Additional property replica is not allowed"),
    (
        with_environment(autoscaling={"minReplicas": 1}),
        "environments.blackjack.autoscaling: Additional property minReplicas is not allowed",
    ),
    (
        least(gateway={"replicas": "three"}),
        "gateway.replicas: Invalid type. Expected: integer, given: string",
    ),
    (
        least(ingress={"enabled": "yes"}),
        "ingress.enabled: Invalid type. Expected: boolean, given: string",
    ),
    (least(image={"tag": 1.1}), "image.tag: Invalid type. Expected: string, given: number"),
    (
        {**LEAST, "environments": ["blackjack"]},
        "environments: Invalid type. Expected: object, given: array",
    ),
    (
        with_environment(capacity=0),
        "environments.blackjack.capacity: Must be greater than or equal to 1",
    ),
    (
        with_environment(capacity=1.5),
        "environments.blackjack.capacity: Invalid type. Expected: integer, given: number",
    ),
    (with_environment(mode="shred"), 'mode must be one of the following: "shared", "sandbox"'),
    (
        least(storage={"weights": {"kind": "S3"}}),
        'storage.weights.kind must be one of the following: "folder", "s3"',
    ),
    (least(runs={"backoffLimit": -1}), "runs.backoffLimit: Must be greater than or equal to 0"),
    (least(gateway={"replicas": None}), "gateway: replicas is required"),
    (
        least(gateway={"tolerations": [{"keys": "x"}]}),
        "gateway.tolerations.0: Additional property keys is not allowed",
    ),
    (
        least(networkPolicy={"runs": [{"ports": [{"prot": "TCP"}]}]}),
        "networkPolicy.runs.0.ports.0: Additional property prot is not allowed",
    ),
]

PROBLEMS = [
    # What the chart itself says: place, what was expected, what to set.
    ({}, "auth.existingSecret", "kubectl create secret generic ludus-auth -n arena"),
    ({}, "environments", "set for example environments.blackjack.package=openspiel_env"),
    (with_environment(package=""), "environments.blackjack.package", "package=openspiel_env"),
    (
        with_environment(image={"repository": ""}),
        "environments.blackjack.image.repository",
        "image.repository=ludus/env-openspiel",
    ),
    (
        with_environment(image={"digest": "sha256:12"}),
        "environments.blackjack.image.digest",
        "or set environments.blackjack.image.tag",
    ),
    (
        over(LEAST, {"environments": {"Black_Jack": BLACKJACK}}),
        "environments.Black_Jack",
        "contain only a-z, 0-9 and -, got Black_Jack; rename it",
    ),
    (
        over(LEAST, {"environments": {"e" * 60: BLACKJACK}}),
        f"environments.{'e' * 60}",
        "shorten the environment's name by 16",
    ),
    (least(fullnameOverride="1st"), "fullnameOverride", "choose another release name"),
    (least(gateway={"maxUnavailable": "0%"}), "gateway.maxUnavailable", "from 1% to 100%, got 0%"),
    (
        least(gateway={"autoscaling": {"enabled": True, "minReplicas": 9}}),
        "gateway.autoscaling",
        "got 9 and 8; raise maxReplicas or lower minReplicas",
    ),
    (
        least(gateway={"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}),
        "gateway.autoscaling",
        "needs gateway.resources.requests.cpu",
    ),
    (
        least(gateway={"resources": {"requests": {"cpu": "much"}}}),
        "gateway.resources.requests.cpu",
        "a quantity such as 500m, 2 or 8Gi, got much",
    ),
    (least(runs={"head": {"shmSize": "lots"}}), "runs.head.shmSize", "got lots; change it"),
    (
        least(gateway={"env": [{"name": "HF_TOKEN", "value": "hf_1"}]}),
        "gateway.env",
        "HF_TOKEN must come from a Secret",
    ),
    (
        with_environment(env=[{"name": "OPENAI_API_KEY", "value": "sk"}]),
        "environments.blackjack.env",
        "set valueFrom.secretKeyRef",
    ),
    (keda(min=5, max=4), "environments.blackjack.autoscaling", "raise max or lower min"),
    (
        keda(sessionsPerPod=300),
        "environments.blackjack.autoscaling.sessionsPerPod",
        "at most the capacity of 256, got 300",
    ),
    (
        keda(scaleDownWindowSeconds=30),
        "environments.blackjack.autoscaling.scaleDownWindowSeconds",
        "at least scaleDownPeriodSeconds (60), got 30",
    ),
    (
        over(keda(min=0), {"gateway": {"sessions": {"queueTimeoutSeconds": 5}}}),
        "gateway.sessions.queueTimeoutSeconds",
        "raise it, or set environments.blackjack.autoscaling.min=1",
    ),
    (
        over(with_environment(autoscaling={"kind": "hpa", "min": 0}), MONITORED),
        "environments.blackjack.autoscaling.min",
        "which cannot start from zero",
    ),
    (
        with_environment(autoscaling={"kind": "keda"}),
        "environments.blackjack.autoscaling.kind",
        "set monitoring.monitors.enabled=true",
    ),
    (
        with_environment(mode="sandbox"),
        "environments.blackjack.capacity",
        "expected 1 with mode sandbox",
    ),
    (
        with_environment(mode="sandbox", capacity=1, autoscaling={"kind": "keda"}),
        "environments.blackjack.autoscaling.kind",
        "set environments.blackjack.sandbox.warmPool instead",
    ),
    (
        with_environment(server={"numWorkers": 4}),
        "environments.blackjack.server.numWorkers",
        "isolation=pool, or remove numWorkers",
    ),
    (
        with_environment(server={"memoryLimitMiB": 64}),
        "environments.blackjack.server.memoryLimitMiB",
        "isolation pool or process",
    ),
    (
        with_environment(server={"cpuLimitSeconds": 64}),
        "environments.blackjack.server.cpuLimitSeconds",
        "isolation=process",
    ),
    (
        least(runs={"rollout": {"min": 3, "replicas": 2}}),
        "runs.rollout",
        "in ascending order, got 3, 2 and 8",
    ),
    (
        least(runs={"learner": {"resources": {"limits": {"nvidia.com/gpu": 8}}}}),
        "runs.learner.ranksPerPod",
        "set runs.learner.ranksPerPod=8",
    ),
    (
        least(runs={"rollout": {"resources": {"limits": {"memory": None}}}}),
        "runs.rollout.resources.limits.memory",
        "set it, for example to 8Gi",
    ),
    (least(runs={"rayVersion": "2.60"}), "runs.rayVersion", "set it to the version of Ray in"),
    (
        least(runs={"queue": {"priorityClass": "high"}}),
        "runs.queue.priorityClass",
        "set it to the LocalQueue",
    ),
    (least(storage={"weights": {"kind": "s3"}}), "storage.s3.bucket", "storage.store.enabled=true"),
    (
        least(storage={"store": {"enabled": True}, "s3": {"existingSecret": "s3"}}),
        "storage.store.enabled",
        "set storage.weights.kind=s3",
    ),
    (store(), "storage.s3.existingSecret", "kubectl create secret generic ludus-s3"),
    (
        store(existingSecret="s3", endpoint="http://s3.example"),
        "storage.s3.endpoint",
        "remove one of the two",
    ),
    (
        least(storage={"weights": {"kind": "s3"}, "s3": {"bucket": "weights"}}),
        "networkPolicy.runs",
        "set for example networkPolicy.runs[0].ports[0].port=443",
    ),
    (
        least(storage={"runs": {"accessModes": []}}),
        "storage.runs.accessModes",
        "set ReadWriteMany",
    ),
    (
        least(networkPolicy={"apiServer": {"cidrs": ["10.0.0.1"]}}),
        "networkPolicy.apiServer.cidrs",
        "like 10.0.0.1/32, got 10.0.0.1",
    ),
    (least(ingress={"enabled": True}), "ingress.host", "set for example ingress.host="),
    (least(grpcRoute={"enabled": True}), "grpcRoute.parentRefs", "parentRefs[0].name=NAME"),
    (
        least(
            ingress={"enabled": True, "host": "a.example"},
            gateway={"tls": {"existingSecret": "tls"}},
        ),
        "ingress.enabled",
        "terminate TLS in one place",
    ),
]

WITHOUT_OPERATORS = [
    (keda(), "environments.blackjack.autoscaling.kind=keda", "KEDA"),
    (with_environment(mode="sandbox", capacity=1), "environments.blackjack.mode=sandbox", "agent-"),
    (least(rayCluster={"enabled": True}), "rayCluster.enabled", "KubeRay"),
    (
        least(httpRoute={"enabled": True, "parentRefs": [{"name": "edge"}]}),
        "httpRoute.enabled",
        "the Gateway API",
    ),
    (MONITORED, "monitoring.monitors.enabled", "the Prometheus operator"),
    (
        least(monitoring={"rules": {"enabled": True}}),
        "monitoring.rules.enabled",
        "the Prometheus operator",
    ),
]


def refusal(values: dict[str, Any], **fields: Any) -> str:
    """What helm says of values that it must refuse."""
    done = template(replace(ValueSet("refused", values), **fields))
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(("values", "sentence"), SHAPES)
def test_what_the_schema_sees(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(values)


@pytest.mark.parametrize(("values", "place", "way_out"), PROBLEMS)
def test_what_the_chart_sees(values: dict[str, Any], place: str, way_out: str) -> None:
    (line,) = (one for one in refusal(values).splitlines() if one.startswith(f"- {place}: "))
    assert way_out in line


@pytest.mark.parametrize(("values", "place", "operator"), WITHOUT_OPERATORS)
def test_a_cluster_without_the_operator(values: dict[str, Any], place: str, operator: str) -> None:
    said = refusal(values, kinds=())
    line = next(one for one in said.splitlines() if one.startswith(f"- {place}: "))
    assert f" of {operator}" in line
    assert "or set " in line


def test_all_mistakes_are_told_at_once() -> None:
    said = refusal(least(ingress={"enabled": True}, grpcRoute={"enabled": True}), kinds=())
    assert len([line for line in said.splitlines() if line.startswith("- ")]) == 3


def test_variables_that_only_sound_like_secrets_are_values() -> None:
    values = least(gateway={"env": [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}]})
    assert template(ValueSet("sounds", values)).returncode == 0
