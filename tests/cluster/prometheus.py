"""Queries to the cluster's Prometheus through the Kubernetes API server.

LUDUS_PROMETHEUS is the address of Prometheus in the cluster. Default: the address in the chart's
values.yaml.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote, urlsplit

import yaml

from tests.cluster.installed import CHART, kubectl

POD_MONITOR_CRD = "podmonitors.monitoring.coreos.com"


def has_prometheus() -> bool:
    """Return True if the cluster has a Prometheus operator."""
    return POD_MONITOR_CRD in kubectl("get", "crd", "-o", "name")


def list_firing_alerts(namespace: str) -> set[str]:
    """Return the names of the alerts that fire in a namespace."""
    series_list = fetch_series(
        f'ALERTS{{alertname=~"Ludus.+",namespace="{namespace}",alertstate="firing"}}'
    )
    return {series["metric"]["alertname"] for series in series_list}


def has_data(expression: str) -> bool:
    """Return True if any series of the expression has a value other than NaN."""
    return any(series["value"][1] != "NaN" for series in fetch_series(expression))


def fetch_series(query: str) -> list[dict[str, Any]]:
    """Run an instant query; return the series of the result."""
    default_address = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"][
        "prometheusAddress"
    ]
    address = urlsplit(os.environ.get("LUDUS_PROMETHEUS", default_address))
    service, namespace = str(address.hostname).split(".")[:2]
    proxy_path = f"/api/v1/namespaces/{namespace}/services/{service}:{address.port or 80}/proxy"
    response = kubectl("get", "--raw", f"{proxy_path}/api/v1/query?query={quote(query, safe='')}")
    series: list[dict[str, Any]] = json.loads(response)["data"]["result"]
    return series
