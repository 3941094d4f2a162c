"""Tests that invalid values are refused with the path, the expected value and the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.charts.rendering import ValueSet, merge_values, template
from tests.charts.value_sets import BLACKJACK, MINIMAL_VALUES, MONITORED_VALUES, merge_environment

pytestmark = pytest.mark.slow


def make_values(**values: Any) -> dict[str, Any]:
    """Return the minimal values with the changes."""
    return merge_values(MINIMAL_VALUES, values)


def make_keda_values(**fields: Any) -> dict[str, Any]:
    """Return values for an environment that KEDA scales."""
    return merge_values(merge_environment(autoscaling={"kind": "keda", **fields}), MONITORED_VALUES)


def make_store_values(**s3: Any) -> dict[str, Any]:
    """Return values that store weights in the bundled store."""
    return make_values(storage={"weights": {"kind": "s3"}, "store": {"enabled": True}, "s3": s3})


SCHEMA_ERRORS = [
    # Error messages of helm, which validates values against values.schema.json.
    (make_values(gatway={}), "(root): Additional property gatway is not allowed"),
    (make_values(gateway={"replica": 3}), "gateway: Additional property replica is not allowed"),
    (
        merge_environment(autoscaling={"minReplicas": 1}),
        "environments.blackjack.autoscaling: Additional property minReplicas is not allowed",
    ),
    (
        make_values(gateway={"replicas": "three"}),
        "gateway.replicas: Invalid type. Expected: integer, given: string",
    ),
    (
        make_values(ingress={"enabled": "yes"}),
        "ingress.enabled: Invalid type. Expected: boolean, given: string",
    ),
    (
        make_values(image={"tag": 1.1}),
        "image.tag: Invalid type. Expected: string, given: number",
    ),
    (
        {**MINIMAL_VALUES, "environments": ["blackjack"]},
        "environments: Invalid type. Expected: object, given: array",
    ),
    (
        merge_environment(capacity=0),
        "environments.blackjack.capacity: Must be greater than or equal to 1",
    ),
    (
        merge_environment(capacity=1.5),
        "environments.blackjack.capacity: Invalid type. Expected: integer, given: number",
    ),
    (merge_environment(mode="shred"), 'mode must be one of the following: "shared", "sandbox"'),
    (
        make_values(storage={"weights": {"kind": "S3"}}),
        'storage.weights.kind must be one of the following: "folder", "s3"',
    ),
    (
        make_values(runs={"backoffLimit": -1}),
        "runs.backoffLimit: Must be greater than or equal to 0",
    ),
    (make_values(gateway={"replicas": None}), "gateway: replicas is required"),
    (
        make_values(gateway={"tolerations": [{"keys": "x"}]}),
        "gateway.tolerations.0: Additional property keys is not allowed",
    ),
    (
        make_values(networkPolicy={"runs": [{"ports": [{"prot": "TCP"}]}]}),
        "networkPolicy.runs.0.ports.0: Additional property prot is not allowed",
    ),
]

CHART_ERRORS = [
    # Error messages of the chart, with the path and the remedy.
    ({}, "auth.existingSecret", "kubectl create secret generic ludus-auth -n arena"),
    ({}, "environments", "set for example environments.blackjack.package=openspiel_env"),
    (merge_environment(package=""), "environments.blackjack.package", "package=openspiel_env"),
    (
        merge_environment(image={"repository": ""}),
        "environments.blackjack.image.repository",
        "image.repository=ludus/env-openspiel",
    ),
    (
        merge_environment(image={"digest": "sha256:12"}),
        "environments.blackjack.image.digest",
        "or set environments.blackjack.image.tag",
    ),
    (
        merge_values(MINIMAL_VALUES, {"environments": {"Black_Jack": BLACKJACK}}),
        "environments.Black_Jack",
        "contain only a-z, 0-9 and -, got Black_Jack; rename it",
    ),
    (
        merge_values(MINIMAL_VALUES, {"environments": {"e" * 60: BLACKJACK}}),
        f"environments.{'e' * 60}",
        "shorten the environment's name by 16",
    ),
    (make_values(fullnameOverride="1st"), "fullnameOverride", "choose another release name"),
    (
        make_values(gateway={"maxUnavailable": "0%"}),
        "gateway.maxUnavailable",
        "from 1% to 100%, got 0%",
    ),
    (
        make_values(gateway={"autoscaling": {"enabled": True, "minReplicas": 9}}),
        "gateway.autoscaling",
        "got 9 and 8; raise maxReplicas or lower minReplicas",
    ),
    (
        make_values(
            gateway={"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}
        ),
        "gateway.autoscaling",
        "needs gateway.resources.requests.cpu",
    ),
    (
        make_values(gateway={"resources": {"requests": {"cpu": "much"}}}),
        "gateway.resources.requests.cpu",
        "a quantity such as 500m, 2 or 8Gi, got much",
    ),
    (
        make_values(runs={"head": {"shmSize": "lots"}}),
        "runs.head.shmSize",
        "got lots; change it",
    ),
    (
        make_values(gateway={"env": [{"name": "HF_TOKEN", "value": "hf_1"}]}),
        "gateway.env",
        "HF_TOKEN must come from a Secret",
    ),
    (
        merge_environment(env=[{"name": "OPENAI_API_KEY", "value": "sk"}]),
        "environments.blackjack.env",
        "set valueFrom.secretKeyRef",
    ),
    (
        make_keda_values(min=5, max=4),
        "environments.blackjack.autoscaling",
        "raise max or lower min",
    ),
    (
        make_keda_values(sessionsPerPod=300),
        "environments.blackjack.autoscaling.sessionsPerPod",
        "at most the capacity of 256, got 300",
    ),
    (
        make_keda_values(scaleDownWindowSeconds=30),
        "environments.blackjack.autoscaling.scaleDownWindowSeconds",
        "at least scaleDownPeriodSeconds (60), got 30",
    ),
    (
        merge_values(
            make_keda_values(min=0), {"gateway": {"sessions": {"queueTimeoutSeconds": 5}}}
        ),
        "gateway.sessions.queueTimeoutSeconds",
        "raise it, or set environments.blackjack.autoscaling.min=1",
    ),
    (
        merge_values(merge_environment(autoscaling={"kind": "hpa", "min": 0}), MONITORED_VALUES),
        "environments.blackjack.autoscaling.min",
        "which cannot start from zero",
    ),
    (
        merge_environment(autoscaling={"kind": "keda"}),
        "environments.blackjack.autoscaling.kind",
        "set monitoring.monitors.enabled=true",
    ),
    (
        merge_environment(mode="sandbox"),
        "environments.blackjack.capacity",
        "expected 1 with mode sandbox",
    ),
    (
        merge_environment(mode="sandbox", capacity=1, autoscaling={"kind": "keda"}),
        "environments.blackjack.autoscaling.kind",
        "set environments.blackjack.sandbox.warmPool instead",
    ),
    (
        merge_environment(server={"numWorkers": 4}),
        "environments.blackjack.server.numWorkers",
        "isolation=pool, or remove numWorkers",
    ),
    (
        merge_environment(server={"memoryLimitMiB": 64}),
        "environments.blackjack.server.memoryLimitMiB",
        "isolation pool or process",
    ),
    (
        merge_environment(server={"noNetwork": True}),
        "environments.blackjack.server.noNetwork",
        "isolation pool or process",
    ),
    (
        merge_environment(server={"cpuLimitSeconds": 64}),
        "environments.blackjack.server.cpuLimitSeconds",
        "isolation=process",
    ),
    (
        make_values(runs={"rollout": {"min": 3, "replicas": 2}}),
        "runs.rollout",
        "in ascending order, got 3, 2 and 8",
    ),
    (
        make_values(runs={"learner": {"resources": {"limits": {"nvidia.com/gpu": 8}}}}),
        "runs.learner.ranksPerPod",
        "set runs.learner.ranksPerPod=8",
    ),
    (
        make_values(runs={"rollout": {"resources": {"limits": {"memory": None}}}}),
        "runs.rollout.resources.limits.memory",
        "set it, for example to 8Gi",
    ),
    (
        make_values(runs={"rayVersion": "2.60"}),
        "runs.rayVersion",
        "set it to the version of Ray in",
    ),
    (
        make_values(runs={"queue": {"priorityClass": "high"}}),
        "runs.queue.priorityClass",
        "set it to the LocalQueue",
    ),
    (
        make_values(storage={"weights": {"kind": "s3"}}),
        "storage.s3.bucket",
        "storage.store.enabled=true",
    ),
    (
        make_values(storage={"store": {"enabled": True}, "s3": {"existingSecret": "s3"}}),
        "storage.store.enabled",
        "set storage.weights.kind=s3",
    ),
    (make_store_values(), "storage.s3.existingSecret", "kubectl create secret generic ludus-s3"),
    (
        make_store_values(existingSecret="s3", endpoint="http://s3.example"),
        "storage.s3.endpoint",
        "remove one of the two",
    ),
    (
        make_values(storage={"weights": {"kind": "s3"}, "s3": {"bucket": "weights"}}),
        "networkPolicy.runs",
        "set for example networkPolicy.runs[0].ports[0].port=443",
    ),
    (
        make_values(storage={"runs": {"accessModes": []}}),
        "storage.runs.accessModes",
        "set ReadWriteMany",
    ),
    (
        make_values(networkPolicy={"apiServer": {"cidrs": ["10.0.0.1"]}}),
        "networkPolicy.apiServer.cidrs",
        "like 10.0.0.1/32, got 10.0.0.1",
    ),
    (
        make_values(networkPolicy={"apiServer": {"cidrs": ["10.0.0.300/99"]}}),
        "networkPolicy.apiServer.cidrs",
        "like 10.0.0.1/32, got 10.0.0.300/99",
    ),
    (make_values(ingress={"enabled": True}), "ingress.host", "set for example ingress.host="),
    (
        make_values(grpcRoute={"enabled": True}),
        "grpcRoute.parentRefs",
        "parentRefs[0].name=NAME",
    ),
    (
        make_values(
            ingress={"enabled": True, "host": "a.example"},
            gateway={"tls": {"existingSecret": "tls"}},
        ),
        "ingress.enabled",
        "terminate TLS in one place",
    ),
]

MALFORMED_VALUES = merge_values(
    merge_environment(
        package="../../etc",
        priorityClassName="High Priority",
        sandbox={"runtimeClassName": "gvisor!"},
        env=[{"name": "A B", "value": "1"}],
    ),
    {
        "auth": {"existingSecret": "my_secret", "keys": {"sessionKey": "session key"}},
        "gateway": {"image": {"repository": "Ludus/gateway", "tag": "a/b"}},
        "grpcRoute": {"hostnames": ["https://ludus.example", "10.0.0.1"]},
        "image": {"registry": "http://registry.example", "tag": "1 2", "pullSecrets": ["a/b"]},
        "ingress": {"host": "a b", "className": "Nginx", "tlsSecret": "tls.pem "},
        "fullnameOverride": "ludus",
        "nameOverride": "Arena!",
        "monitoring": {
            "monitors": {"interval": "often", "gatewayInterval": "5 s"},
            "prometheusAddress": "prometheus:9090",
        },
        "runs": {"queue": {"name": "my queue"}},
        "storage": {
            "runs": {"existingClaim": "../claim", "storageClassName": "Fast SSD"},
            "s3": {"prefix": "../../other", "region": "us east"},
        },
    },
)
"""Values that a schema of types accepts, one per place, in every kind of format."""
MALFORMED_PLACES = [
    ("auth.existingSecret", '"my_secret"'),
    ("auth.keys.sessionKey", '"session key"'),
    ("environments.blackjack.env[0].name", '"A B"'),
    ("environments.blackjack.package", '"../../etc"'),
    ("environments.blackjack.priorityClassName", '"High Priority"'),
    ("environments.blackjack.sandbox.runtimeClassName", '"gvisor!"'),
    ("gateway.image.repository", '"Ludus/gateway"'),
    ("gateway.image.tag", '"a/b"'),
    ("grpcRoute.hostnames[0]", '"https://ludus.example"'),
    ("grpcRoute.hostnames[1]", '"10.0.0.1"'),
    ("image.pullSecrets[0]", '"a/b"'),
    ("image.registry", '"http://registry.example"'),
    ("image.tag", '"1 2"'),
    ("ingress.className", '"Nginx"'),
    ("ingress.host", '"a b"'),
    ("ingress.tlsSecret", '"tls.pem "'),
    ("monitoring.monitors.gatewayInterval", '"5 s"'),
    ("monitoring.monitors.interval", '"often"'),
    ("monitoring.prometheusAddress", '"prometheus:9090"'),
    ("nameOverride", '"Arena!"'),
    ("runs.queue.name", '"my queue"'),
    ("storage.runs.existingClaim", '"../claim"'),
    ("storage.runs.storageClassName", '"Fast SSD"'),
    ("storage.s3.prefix", '"../../other"'),
    ("storage.s3.region", '"us east"'),
]

OPERATOR_ERRORS = [
    (make_keda_values(), "environments.blackjack.autoscaling.kind=keda", "KEDA"),
    (
        merge_environment(mode="sandbox", capacity=1),
        "environments.blackjack.mode=sandbox",
        "agent-",
    ),
    (make_values(rayCluster={"enabled": True}), "rayCluster.enabled", "KubeRay"),
    (
        make_values(httpRoute={"enabled": True, "parentRefs": [{"name": "edge"}]}),
        "httpRoute.enabled",
        "the Gateway API",
    ),
    (MONITORED_VALUES, "monitoring.monitors.enabled", "the Prometheus operator"),
    (
        make_values(monitoring={"rules": {"enabled": True}}),
        "monitoring.rules.enabled",
        "the Prometheus operator",
    ),
]


def render_invalid_values(values: dict[str, Any], **fields: Any) -> str:
    """Render invalid values, and return helm's error message."""
    result = template(replace(ValueSet("refused", values), **fields))
    assert result.returncode == 1
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(("values", "sentence"), SCHEMA_ERRORS)
def test_schema_rejects_invalid_values(values: dict[str, Any], sentence: str) -> None:
    assert sentence in render_invalid_values(values)


@pytest.mark.parametrize(("values", "path", "remedy"), CHART_ERRORS)
def test_chart_rejects_invalid_values(values: dict[str, Any], path: str, remedy: str) -> None:
    (line,) = (
        text_line
        for text_line in render_invalid_values(values).splitlines()
        if text_line.startswith(f"- {path}: ")
    )
    assert remedy in line


def test_malformed_texts_are_refused_with_an_example() -> None:
    message = render_invalid_values(MALFORMED_VALUES)
    lines = [line for line in message.splitlines() if line.startswith("- ")]
    assert len(lines) == len(MALFORMED_PLACES)
    for path, text in MALFORMED_PLACES:
        (line,) = (line for line in lines if line.startswith(f"- {path}: expected "))
        assert f"got {text}; change it" in line


@pytest.mark.parametrize(
    "package",
    ["a.b_c", "shell:Env", "gymnasium:ALE/Pong-v5", "openenv:echo_env.server:app"],
)
def test_all_kinds_of_targets_are_accepted(package: str) -> None:
    result = template(ValueSet("target", merge_environment(package=package)))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("values", "path", "operator"), OPERATOR_ERRORS)
def test_missing_operator_fails_rendering(values: dict[str, Any], path: str, operator: str) -> None:
    message = render_invalid_values(values, kinds=())
    line = next(
        text_line for text_line in message.splitlines() if text_line.startswith(f"- {path}: ")
    )
    assert f" of {operator}" in line
    assert "or set " in line


def test_all_errors_are_reported_together() -> None:
    message = render_invalid_values(
        make_values(ingress={"enabled": True}, grpcRoute={"enabled": True}), kinds=()
    )
    assert len([line for line in message.splitlines() if line.startswith("- ")]) == 3


def test_variables_with_names_like_secrets_are_allowed() -> None:
    values = make_values(gateway={"env": [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}]})
    assert template(ValueSet("allowed", values)).returncode == 0
