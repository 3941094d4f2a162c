"""Value sets for tests of the chart, with every feature and with extreme names and numbers."""

from __future__ import annotations

from typing import Any

from tests.charts.rendering import ValueSet, merge_values

BLACKJACK: dict[str, Any] = {
    "image": {"repository": "ludus/env-openspiel"},
    "package": "openspiel_env",
    "options": {"game": "blackjack"},
}
MINIMAL_VALUES: dict[str, Any] = {
    "auth": {"existingSecret": "ludus-auth"},
    "environments": {"blackjack": BLACKJACK},
}
MONITORED_VALUES: dict[str, Any] = {"monitoring": {"monitors": {"enabled": True}}}


def merge_environment(**fields: Any) -> dict[str, Any]:
    """Return the minimal values with changed fields of the environment."""
    return merge_values(MINIMAL_VALUES, {"environments": {"blackjack": fields}})


def _make_set(name: str, values: dict[str, Any], **fields: Any) -> ValueSet:
    return ValueSet(name, merge_values(MINIMAL_VALUES, values), **fields)


CPU_SET = ValueSet("values-cpu", file="values-cpu.yaml")
GPU_SET = ValueSet("values-gpu", file="values-gpu.yaml")
SHIPPED_SETS = (CPU_SET, GPU_SET)

_PLACEMENT: dict[str, Any] = {
    "nodeSelector": {"pool": "play"},
    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {}},
}
_POD_FIELDS: dict[str, Any] = {
    "env": [{"name": "LOG_LEVEL", "value": "debug"}],
    "podAnnotations": {"team": "games"},
    "priorityClassName": "high",
    **_PLACEMENT,
}
_KEDA_AUTOSCALING: dict[str, Any] = {"kind": "keda", "min": 0, "max": 9}
_ROUTE_FIELDS: dict[str, Any] = {
    "enabled": True,
    "parentRefs": [{"name": "outside", "namespace": "edge", "sectionName": "https"}],
    "hostnames": ["ludus.example.com"],
    "annotations": {"team": "games"},
}
_BUNDLED_STORE: dict[str, Any] = {
    "weights": {"kind": "s3"},
    "store": {"enabled": True},
    "s3": {"existingSecret": "ludus-s3"},
}
_EGRESS_RULES: dict[str, Any] = {"runs": [{"ports": [{"protocol": "TCP", "port": 443}]}]}

FEATURE_SETS = (
    _make_set("minimal", {}),
    _make_set(
        "keda-from-zero",
        merge_values(merge_environment(autoscaling=_KEDA_AUTOSCALING), MONITORED_VALUES),
    ),
    _make_set(
        "keda-from-one",
        merge_values(
            merge_environment(autoscaling={**_KEDA_AUTOSCALING, "min": 1}), MONITORED_VALUES
        ),
    ),
    _make_set(
        "hpa", merge_values(merge_environment(autoscaling={"kind": "hpa"}), MONITORED_VALUES)
    ),
    _make_set(
        "sandbox", {"environments": {"code": {**BLACKJACK, "mode": "sandbox", "capacity": 1}}}
    ),
    _make_set(
        "sandbox-alone",
        {
            "environments": {
                "blackjack": {
                    "mode": "sandbox",
                    "capacity": 1,
                    "sandbox": {"warmPool": 0, "runtimeClassName": "gvisor"},
                    **_POD_FIELDS,
                }
            }
        },
    ),
    _make_set("gateway-scaled", {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 1}}}),
    _make_set("gateway-tls", {"gateway": {"tls": {"existingSecret": "gateway-tls"}}}),
    _make_set("gateway-tenants", {"gateway": {"tenants": {"existingSecret": "tenants"}}}),
    _make_set(
        "gateway-placed",
        {
            "gateway": {
                **_POD_FIELDS,
                "service": {"type": "LoadBalancer", "annotations": {"team": "games"}},
            }
        },
    ),
    _make_set("environment-placed", merge_environment(**_POD_FIELDS)),
    _make_set("store", {"storage": _BUNDLED_STORE}),
    _make_set(
        "bucket",
        {
            "storage": {
                "weights": {"kind": "s3"},
                "s3": {
                    "bucket": "weights",
                    "endpoint": "https://storage.example:9000",
                    "existingSecret": "s3",
                },
            },
            "networkPolicy": _EGRESS_RULES,
        },
    ),
    _make_set(
        "bucket-by-identity",
        {
            "storage": {"weights": {"kind": "s3"}, "s3": {"bucket": "weights"}},
            "networkPolicy": _EGRESS_RULES,
            "runs": {"serviceAccount": {"annotations": {"cloud/role": "trainer"}}},
        },
    ),
    _make_set(
        "claims",
        {
            "storage": {"runs": {"existingClaim": "shared"}},
            "runs": {"cache": {"existingClaim": "models"}},
        },
    ),
    _make_set("ingress", {"ingress": {"enabled": True, "host": "ludus.example.com"}}),
    _make_set(
        "ingress-tls",
        {
            "ingress": {
                "enabled": True,
                "host": "ludus.example.com",
                "className": "traefik",
                "tlsSecret": "edge-tls",
                "annotations": {"team": "games"},
            }
        },
    ),
    _make_set("routes", {"httpRoute": _ROUTE_FIELDS, "grpcRoute": _ROUTE_FIELDS}),
    _make_set(
        "monitored",
        {
            "monitoring": {
                "labels": {"release": "prometheus"},
                "monitors": {"enabled": True},
                "rules": {"enabled": True},
                "dashboards": {"enabled": True},
            }
        },
    ),
    _make_set("queue", {"runs": {"queue": {"name": "games", "priorityClass": "low"}}}),
    _make_set(
        "queue-of-fixed-size",
        {"runs": {"queue": {"name": "games"}, "autoscaling": {"enabled": False}}},
    ),
    _make_set("cluster", {"rayCluster": {"enabled": True}}),
    _make_set(
        "cluster-of-fixed-size",
        {"rayCluster": {"enabled": True}, "runs": {"autoscaling": {"enabled": False}}},
    ),
    _make_set(
        "runs-placed",
        {
            "runs": {
                "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
                "podAnnotations": {"team": "games"},
                "priorityClassName": "high",
                "activeDeadlineSeconds": 3600,
                "preRunningDeadlineSeconds": 600,
                "head": _PLACEMENT,
                "learner": {**_PLACEMENT, "numCpus": 4},
                "rollout": {**_PLACEMENT, "env": [{"name": "A", "value": "b"}]},
            }
        },
    ),
    _make_set("open-network", {"networkPolicy": {"enabled": False}}),
    _make_set(
        "network",
        {
            "networkPolicy": {
                **_EGRESS_RULES,
                "clients": [{"namespaceSelector": {"matchLabels": {"team": "games"}}}],
                "prometheus": [],
                "dns": {"to": [{"ipBlock": {"cidr": "169.254.20.10/32"}}], "port": 5353},
                "apiServer": {"cidrs": ["10.0.0.1/32"], "ports": [6443]},
            },
            "environments": {
                "blackjack": {
                    "networkPolicy": {
                        "egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}],
                        "ingress": [{"from": [{"podSelector": {}}]}],
                    }
                }
            },
        },
    ),
)

FULL_SET = _make_set(
    "everything",
    {
        "storage": _BUNDLED_STORE,
        "monitoring": {"monitors": {"enabled": True}},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "games"}}}],
            "runs": [
                {
                    "to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}],
                    "ports": [{"protocol": "TCP", "port": 443}],
                }
            ],
        },
        "environments": {"code": {**BLACKJACK, "mode": "sandbox", "capacity": 1}},
    },
)
"""Values that need every flow of the diagram in the docs."""

LIMIT_SETS = (
    ValueSet("long-release", MINIMAL_VALUES, release="a" * 50 + "-b1"),
    ValueSet("other-release-name", MINIMAL_VALUES, release="games"),
    _make_set("full-name", {"fullnameOverride": "x", "nameOverride": "play"}),
    _make_set(
        "long-environment",
        # `helm lint` uses another release name.
        {"fullnameOverride": "ludus", "environments": {"e" * 44: BLACKJACK}},
    ),
    _make_set(
        "zero-values",
        {
            "gateway": {
                "maxConnectionAgeSeconds": 0,
                "sessions": {"queueSize": 0, "lingerSeconds": 0, "queueTimeoutSeconds": 0},
            },
            "environmentDefaults": {"replicas": 3, "server": {"stepTimeoutSeconds": 5}},
            "environments": {
                "blackjack": {
                    "replicas": 0,
                    "drainSeconds": 0,
                    "server": {"stepTimeoutSeconds": 0},
                }
            },
            "runs": {
                "backoffLimit": 0,
                "ttlSecondsAfterFinished": 0,
                "drainSeconds": 0,
                "rollout": {"min": 0},
            },
        },
    ),
    _make_set(
        "false-values",
        {
            "environmentDefaults": {"safeToEvict": True, "podAnnotations": {"a": "b"}},
            "environments": {"blackjack": {"safeToEvict": False, "podAnnotations": {}}},
            "storage": {"runs": {"keep": False}},
        },
    ),
    _make_set(
        "unusual-options",
        {
            "environments": {
                "blackjack": {
                    "options": {"text": 'it\'s "so" {{ .X }} $(A) é\n', "rate": 1e-6, "no": False}
                },
                "gym": {
                    "image": {"repository": "me/gym", "tag": "1.2"},
                    "command": ["python", "-m", "ludus.env"],
                    "package": "gymnasium:CartPole-v1",
                    "server": {
                        "isolation": "pool",
                        "numWorkers": 2,
                        "numThreads": 4,
                        "stepTimeoutSeconds": 2.5,
                        "idleTimeoutSeconds": 60,
                        "memoryLimitMiB": 512,
                        "requireSandbox": True,
                        "noNetwork": True,
                        "deterministic": False,
                    },
                },
                "shell": {
                    "image": {"repository": "me/shell"},
                    "package": "shell:Env",
                    "server": {
                        "isolation": "process",
                        "cpuLimitSeconds": 60,
                        "acceptMissing": ["signal-scope", "landlock"],
                        "deterministic": True,
                    },
                },
            }
        },
    ),
    _make_set(
        "images",
        {
            "image": {
                "registry": "registry.example:5000",
                "tag": "2.0",
                "pullPolicy": "Always",
                "pullSecrets": ["one", "two"],
            },
            "gateway": {"image": {"registry": "other.example", "digest": "sha256:" + "0" * 64}},
        },
    ),
)

ALL_SETS = (*SHIPPED_SETS, *FEATURE_SETS, FULL_SET, *LIMIT_SETS)
