"""A fake release of Ludus in the form that `ludus submit` reads, and runs to submit."""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml

from ludus.proto.config import LanguageModelRun
from ludus.services.runs.manifest import RunManifests, make_manifests
from ludus.services.runs.platform import Release, parse_release

NAMESPACE = "arena"
IMAGE = "docker.io/ludus/trainer:dev"
Json = dict[str, Any]


def make_container(name: str, resource: str, **resources: str) -> Json:
    amounts = {"cpu": "1", "memory": "1Gi", **resources}
    secret = {"secretKeyRef": {"name": "ludus-auth", "key": "gateway-token"}}
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "LUDUS_ENV_TOKEN", "valueFrom": secret},
        ],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "run-config", "mountPath": "/etc/ludus", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def make_pod_template(name: str, resource: str, **resources: str) -> Json:
    return {
        "metadata": {"labels": {"app.kubernetes.io/component": "trainer"}},
        "spec": {
            "serviceAccountName": "ludus-trainer",
            "terminationGracePeriodSeconds": 120,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
            "containers": [make_container(name, resource, **resources)],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": "ludus-runs"}},
                {"name": "run-config", "configMap": {"name": "RUN-config"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


def make_start_params(resource: str, count: int) -> Json:
    # The chart writes JSON and quotes it again for the shell of KubeRay.
    return {"resources": json.dumps(json.dumps({resource: count}))}


def make_worker_group(
    name: str, min_replicas: int, max_replicas: int, per_pod: int = 1, **resources: str
) -> Json:
    return {
        "groupName": name,
        "replicas": min_replicas,
        "minReplicas": min_replicas,
        "maxReplicas": max_replicas,
        "rayStartParams": make_start_params(name, per_pod),
        "template": make_pod_template("ray-worker", name, **resources),
    }


def make_ray_job_template(**spec: Any) -> Json:
    """Return the RayJob template of a release."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "RUN", "namespace": NAMESPACE, "labels": {"part": "trainer"}},
        "spec": {
            "submissionMode": "HTTPMode",
            "entrypoint": "python -m ludus.trainer train --config /etc/ludus/run.json "
            "--resume=auto",
            "metadata": {"run_id": "RUN"},
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "backoffLimit": 3,
            "rayClusterSpec": {
                "rayVersion": "2.60.0",
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {
                    "version": "v2",
                    "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
                },
                "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", **make_start_params("head", 1000)},
                    "template": make_pod_template("ray-head", "head"),
                },
                "workerGroupSpecs": [
                    make_worker_group("learner", 1, 1),
                    make_worker_group("rollout", 1, 4),
                ],
            },
            **spec,
        },
    }


def make_platform(**changes: Any) -> Json:
    environment = {"address": "grpc://ludus-gateway:18000/blackjack", "package": "openspiel_env"}
    return {
        "release": "ludus",
        "namespace": NAMESPACE,
        "environments": {
            "blackjack": {**environment, "options": {"game": "blackjack"}, "http": "x"}
        },
        "gateway": {"service": "ludus-gateway"},
        "output_dir": "/runs",
        "weights": {"kind": "folder"},
        "token_secret": "ludus-auth",
        "queue": None,
        "ray_version": "2.60.0",
        **changes,
    }


def make_policy_template() -> Json:
    """Return the NetworkPolicy template of a release that restricts its network."""
    selector = {"matchLabels": {"part": "trainer", "ludus.dev/run": "RUN"}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "RUN-network", "namespace": NAMESPACE},
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": selector}]}],
            "egress": [{"to": [{"podSelector": selector}]}],
        },
    }


def make_config_map(job: Json | None = None, **changes: Any) -> Json:
    """Return the ConfigMap with the description of a release."""
    description = make_platform(**changes)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{description['release']}-runs",
            "namespace": NAMESPACE,
            "labels": {"ludus.dev/runs": "true"},
        },
        "data": {
            "rayjob.yaml": yaml.dump(job or make_ray_job_template(), Dumper=yaml.CSafeDumper),
            "platform.json": json.dumps(description),
        },
    }


def make_release(job: Json | None = None, **changes: Any) -> Release:
    return parse_release(make_config_map(job, **changes))


def make_run_config(**changes: Any) -> LanguageModelRun:
    config: Json = {
        "name": "demo",
        "environment": {"package": "openspiel_env", "options": {"game": "blackjack"}},
        "training": {"num_steps": 3},
    }
    return LanguageModelRun.model_validate({**config, **changes})


def build_manifests(job: Json | None = None, **changes: Any) -> RunManifests:
    return make_manifests(make_run_config(**changes), make_release(job))


def make_ray_job(**spec: Any) -> Json:
    """Return the RayJob of a run with changed fields in its spec."""
    job = copy.deepcopy(build_manifests().job)
    job["spec"].update(spec)
    return job
