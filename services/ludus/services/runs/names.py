"""Names of runs and of their objects on a cluster.

RayJob      NAME            label ludus.dev/run: NAME
ConfigMap   NAME-config     the same label; the configuration, mounted at /etc/ludus
policy      NAME-network    the same label; a NetworkPolicy, if the release restricts its network
folder      /runs/NAME      on the release's volume; remains after both objects are deleted
"""

from __future__ import annotations

import re

from ludus.services.kubernetes.api import make_resource_path

RAY_API = "ray.io/v1"
RUN_LABEL = "ludus.dev/run"
RELEASE_LABEL = "ludus.dev/release"
RUNS_LABEL = "ludus.dev/runs"
"""Label of a release's ConfigMap that contains the template of its runs."""
CLUSTER_LABEL = "ray.io/cluster"
NODE_TYPE_LABEL = "ray.io/node-type"
GROUP_LABEL = "ray.io/group"
COMPONENT_LABEL = "app.kubernetes.io/component"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ELASTIC_ANNOTATION = "kueue.x-k8s.io/elastic-job"

NETWORK_LABEL = "ludus.dev/network"
"""Label of pods for which their run has a NetworkPolicy."""

TEMPLATE_KEY, POLICY_KEY, PLATFORM_KEY = "rayjob.yaml", "networkpolicy.yaml", "platform.json"
RUN_KEY, CONTROL_KEY = "run.json", "control.json"
CONFIG_FOLDER = "/etc/ludus"
PLACEHOLDER = "RUN"
"""Placeholder for the run's name in a release's template."""

MAX_NAME_CHARS = 47
"""Maximum length of a run's name. KubeRay derives longer names of pods and services from it."""
_DNS_1035_PATTERN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def explain_job_name_problem(name: str) -> str:
    """Return the reason why a RayJob cannot have this name, and a remedy; '' if it can."""
    if len(name) > MAX_NAME_CHARS:
        return (
            f"name = '{name}' has {len(name)} characters, but a RayJob's name has at most "
            f"{MAX_NAME_CHARS}; set a shorter name with --set name=..."
        )
    if not _DNS_1035_PATTERN.fullmatch(name):
        return (
            f"name = '{name}' cannot be the name of a RayJob, which consists of lower-case "
            f"letters, digits and '-' and starts with a letter; try --set "
            f"name={_suggest_name(name)}"
        )
    return ""


def make_config_map_name(run: str) -> str:
    """Return the name of a run's ConfigMap."""
    return f"{run}-config"


def make_policy_name(run: str) -> str:
    """Return the name of a run's NetworkPolicy."""
    return f"{run}-network"


def make_policy_path(namespace: str, run: str = "") -> str:
    """Return the API path of a run's NetworkPolicy, or of all NetworkPolicies."""
    name = make_policy_name(run) if run else ""
    return make_resource_path("networking.k8s.io/v1", namespace, "networkpolicies", name)


def make_job_path(namespace: str, run: str = "") -> str:
    """Return the API path of a run's RayJob, or of all RayJobs."""
    return make_resource_path(RAY_API, namespace, "rayjobs", run)


def make_core_path(namespace: str, plural: str, name: str = "") -> str:
    """Return the API path of a core resource, such as a pod, or of all resources of its kind."""
    return make_resource_path("v1", namespace, plural, name)


def _suggest_name(name: str) -> str:
    suggestion = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return suggestion if suggestion[:1].isalpha() else f"run-{suggestion}".rstrip("-")
