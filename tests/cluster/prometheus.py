"""What the cluster's Prometheus knows, asked through the API server.

LUDUS_PROMETHEUS is its address in the cluster; the chart's own default is taken where it is not
set.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote, urlsplit

import yaml

from tests.cluster.installed import CHART, kubectl

MONITORS = "podmonitors.monitoring.coreos.com"


def is_there() -> bool:
    """Whether the cluster has a Prometheus operator."""
    return MONITORS in kubectl("get", "crd", "-o", "name")


def firing(namespace: str) -> set[str]:
    """The alerts of a namespace that are firing."""
    found = ask(f'ALERTS{{alertname=~"Ludus.+",namespace="{namespace}",alertstate="firing"}}')
    return {series["metric"]["alertname"] for series in found}


def has_data(expression: str) -> bool:
    """Whether any series of the answer is a number."""
    return any(series["value"][1] != "NaN" for series in ask(expression))


def ask(query: str) -> list[dict[str, Any]]:
    """The series of Prometheus' answer."""
    default = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusAddress"]
    address = urlsplit(os.environ.get("LUDUS_PROMETHEUS", default))
    service, namespace = str(address.hostname).split(".")[:2]
    place = f"/api/v1/namespaces/{namespace}/services/{service}:{address.port or 80}/proxy"
    said = kubectl("get", "--raw", f"{place}/api/v1/query?query={quote(query, safe='')}")
    result: list[dict[str, Any]] = json.loads(said)["data"]["result"]
    return result
