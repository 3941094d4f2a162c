"""What runs are called in a cluster, and which objects belong to one.

RayJob      NAME            labels ludus.dev/run: NAME
ConfigMap   NAME-config     the same; what the run is, mounted at /etc/ludus
folder      /runs/NAME      on the release's volume; outlives both
"""

from __future__ import annotations

import re

from ludus.services.kubernetes.api import resource_path

RAY_API = "ray.io/v1"
RAY_JOBS = "rayjobs"
RUN_LABEL = "ludus.dev/run"
RELEASE_LABEL = "ludus.dev/release"
RUNS_LABEL = "ludus.dev/runs"
"""On the ConfigMap of a release that says how runs are made."""
CLUSTER_LABEL = "ray.io/cluster"
NODE_TYPE_LABEL = "ray.io/node-type"
GROUP_LABEL = "ray.io/group"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ELASTIC_ANNOTATION = "kueue.x-k8s.io/elastic-job"

TEMPLATE_KEY, PLATFORM_KEY = "rayjob.yaml", "platform.json"
RUN_KEY, CONTROL_KEY = "run.json", "control.json"
CONFIG_FOLDER = "/etc/ludus"
PLACEHOLDER = "RUN"
"""Stands in a release's template where the name of the run belongs."""

MAX_NAME_CHARS = 47
"""KubeRay makes the names of a RayCluster, its pods and services from it."""
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def why_no_name(name: str) -> str:
    """Why a RayJob cannot have this name, and what to do; empty where it can."""
    if len(name) > MAX_NAME_CHARS:
        return (
            f"name = '{name}' has {len(name)} characters, and a RayJob's name at most "
            f"{MAX_NAME_CHARS}; set a shorter one with --set name=..."
        )
    if not _DNS_1035.fullmatch(name):
        return (
            f"name = '{name}' cannot be a RayJob's: expected lower-case letters, digits and '-', "
            f"beginning with a letter; for example --set name={_close_to(name)}"
        )
    return ""


def config_map_name(run: str) -> str:
    """The name of a run's ConfigMap."""
    return f"{run}-config"


def job_path(namespace: str, run: str = "") -> str:
    """The API path of a run's RayJob, or of all."""
    return resource_path(RAY_API, namespace, RAY_JOBS, run)


def core_path(namespace: str, plural: str, name: str = "") -> str:
    """The API path of pods, ConfigMaps and their like, or of one."""
    return resource_path("v1", namespace, plural, name)


def _close_to(name: str) -> str:
    close = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return close if close[:1].isalpha() else f"run-{close}".rstrip("-")
