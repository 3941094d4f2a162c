"""A release of Ludus as its chart describes it to `ludus submit`, and runs to submit."""

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


def container(name: str, resource: str, **resources: str) -> Json:
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


def template(name: str, resource: str, **resources: str) -> Json:
    return {
        "metadata": {"labels": {"app.kubernetes.io/component": "trainer"}},
        "spec": {
            "serviceAccountName": "ludus-trainer",
            "terminationGracePeriodSeconds": 120,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
            "containers": [container(name, resource, **resources)],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": "ludus-runs"}},
                {"name": "run-config", "configMap": {"name": "RUN-config"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


def start_params(resource: str, count: int) -> Json:
    # The chart writes JSON and quotes it again for the shell of KubeRay.
    return {"resources": json.dumps(json.dumps({resource: count}))}


def group(
    name: str, min_replicas: int, max_replicas: int, per_pod: int = 1, **resources: str
) -> Json:
    return {
        "groupName": name,
        "replicas": min_replicas,
        "minReplicas": min_replicas,
        "maxReplicas": max_replicas,
        "rayStartParams": start_params(name, per_pod),
        "template": template("ray-worker", name, **resources),
    }


def ray_job(**spec: Any) -> Json:
    """Return the template of a release's RayJobs."""
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
                    "rayStartParams": {"num-cpus": "0", **start_params("head", 1000)},
                    "template": template("ray-head", "head"),
                },
                "workerGroupSpecs": [group("learner", 1, 1), group("rollout", 1, 4)],
            },
            **spec,
        },
    }


def platform(**changes: Any) -> Json:
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


def config_map(job: Json | None = None, **changes: Any) -> Json:
    """Return the ConfigMap in which a release describes itself."""
    description = platform(**changes)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{description['release']}-runs",
            "namespace": NAMESPACE,
            "labels": {"ludus.dev/runs": "true"},
        },
        "data": {
            "rayjob.yaml": yaml.dump(job or ray_job(), Dumper=yaml.CSafeDumper),
            "platform.json": json.dumps(description),
        },
    }


def release(job: Json | None = None, **changes: Any) -> Release:
    return parse_release(config_map(job, **changes))


def run_config(**changes: Any) -> LanguageModelRun:
    config: Json = {
        "name": "demo",
        "environment": {"package": "openspiel_env", "options": {"game": "blackjack"}},
        "training": {"num_steps": 3},
    }
    return LanguageModelRun.model_validate({**config, **changes})


def manifests(job: Json | None = None, **changes: Any) -> RunManifests:
    return make_manifests(run_config(**changes), release(job))


def change_spec(**spec: Any) -> Json:
    """Return the RayJob of a run with changed fields in its spec."""
    job = copy.deepcopy(manifests().job)
    job["spec"].update(spec)
    return job
