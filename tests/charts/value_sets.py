"""Value sets of the chart's tests: each feature on and off, names and numbers at their limits."""

from __future__ import annotations

from typing import Any

from tests.charts.rendering import ValueSet, merge_values

BLACKJACK: dict[str, Any] = {
    "image": {"repository": "ludus/env-openspiel"},
    "package": "openspiel_env",
    "options": {"game": "blackjack"},
}
LEAST: dict[str, Any] = {
    "auth": {"existingSecret": "ludus-auth"},
    "environments": {"blackjack": BLACKJACK},
}
MONITORED: dict[str, Any] = {"monitoring": {"monitors": {"enabled": True}}}


def merge_environment(**fields: Any) -> dict[str, Any]:
    """Return the minimal values with fields of the environment."""
    return merge_values(LEAST, {"environments": {"blackjack": fields}})


def _set(name: str, values: dict[str, Any], **fields: Any) -> ValueSet:
    return ValueSet(name, merge_values(LEAST, values), **fields)


CPU = ValueSet("values-cpu", file="values-cpu.yaml")
GPU = ValueSet("values-gpu", file="values-gpu.yaml")
SHIPPED = (CPU, GPU)

_PLACEMENT: dict[str, Any] = {
    "nodeSelector": {"pool": "play"},
    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {}},
}
_EXTRA: dict[str, Any] = {
    "env": [{"name": "LOG_LEVEL", "value": "debug"}],
    "podAnnotations": {"team": "games"},
    "priorityClassName": "high",
    **_PLACEMENT,
}
_KEDA: dict[str, Any] = {"kind": "keda", "min": 0, "max": 9}
_ROUTE: dict[str, Any] = {
    "enabled": True,
    "parentRefs": [{"name": "outside", "namespace": "edge", "sectionName": "https"}],
    "hostnames": ["ludus.example.com"],
    "annotations": {"team": "games"},
}
_STORE: dict[str, Any] = {
    "weights": {"kind": "s3"},
    "store": {"enabled": True},
    "s3": {"existingSecret": "ludus-s3"},
}
_EGRESS: dict[str, Any] = {"runs": [{"ports": [{"protocol": "TCP", "port": 443}]}]}

FEATURES = (
    _set("least", {}),
    _set("keda-from-zero", merge_values(merge_environment(autoscaling=_KEDA), MONITORED)),
    _set(
        "keda-from-one", merge_values(merge_environment(autoscaling={**_KEDA, "min": 1}), MONITORED)
    ),
    _set("hpa", merge_values(merge_environment(autoscaling={"kind": "hpa"}), MONITORED)),
    _set("sandbox", {"environments": {"code": {**BLACKJACK, "mode": "sandbox", "capacity": 1}}}),
    _set(
        "sandbox-alone",
        {
            "environments": {
                "blackjack": {
                    "mode": "sandbox",
                    "capacity": 1,
                    "sandbox": {"warmPool": 0, "runtimeClassName": "gvisor"},
                    **_EXTRA,
                }
            }
        },
    ),
    _set("gateway-scaled", {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 1}}}),
    _set("gateway-tls", {"gateway": {"tls": {"existingSecret": "gateway-tls"}}}),
    _set("gateway-tenants", {"gateway": {"tenants": {"existingSecret": "tenants"}}}),
    _set(
        "gateway-placed",
        {
            "gateway": {
                **_EXTRA,
                "service": {"type": "LoadBalancer", "annotations": {"team": "games"}},
            }
        },
    ),
    _set("environment-placed", merge_environment(**_EXTRA)),
    _set("store", {"storage": _STORE}),
    _set(
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
            "networkPolicy": _EGRESS,
        },
    ),
    _set(
        "bucket-by-identity",
        {
            "storage": {"weights": {"kind": "s3"}, "s3": {"bucket": "weights"}},
            "networkPolicy": _EGRESS,
            "runs": {"serviceAccount": {"annotations": {"cloud/role": "trainer"}}},
        },
    ),
    _set(
        "claims",
        {
            "storage": {"runs": {"existingClaim": "shared"}},
            "runs": {"cache": {"existingClaim": "models"}},
        },
    ),
    _set("ingress", {"ingress": {"enabled": True, "host": "ludus.example.com"}}),
    _set(
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
    _set("routes", {"httpRoute": _ROUTE, "grpcRoute": _ROUTE}),
    _set(
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
    _set("queue", {"runs": {"queue": {"name": "games", "priorityClass": "low"}}}),
    _set(
        "queue-of-fixed-size",
        {"runs": {"queue": {"name": "games"}, "autoscaling": {"enabled": False}}},
    ),
    _set("cluster", {"rayCluster": {"enabled": True}}),
    _set(
        "cluster-of-fixed-size",
        {"rayCluster": {"enabled": True}, "runs": {"autoscaling": {"enabled": False}}},
    ),
    _set(
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
    _set("open-network", {"networkPolicy": {"enabled": False}}),
    _set(
        "network",
        {
            "networkPolicy": {
                **_EGRESS,
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

EVERYTHING = _set(
    "everything",
    {
        "storage": _STORE,
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
"""Values that use every flow of the diagram in the docs."""

LIMITS = (
    ValueSet("long-release", LEAST, release="a" * 50 + "-b1"),
    ValueSet("release-named-otherwise", LEAST, release="games"),
    _set("full-name", {"fullnameOverride": "x", "nameOverride": "play"}),
    _set(
        "long-environment",
        # `helm lint` chooses another release name.
        {"fullnameOverride": "ludus", "environments": {"e" * 44: BLACKJACK}},
    ),
    _set(
        "zeros",
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
    _set(
        "falses",
        {
            "environmentDefaults": {"safeToEvict": True, "podAnnotations": {"a": "b"}},
            "environments": {"blackjack": {"safeToEvict": False, "podAnnotations": {}}},
            "storage": {"runs": {"keep": False}},
        },
    ),
    _set(
        "odd-options",
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
                    },
                },
                "shell": {
                    "image": {"repository": "me/shell"},
                    "package": "shell:Env",
                    "server": {"isolation": "process", "cpuLimitSeconds": 60},
                },
            }
        },
    ),
    _set(
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

ALL = (*SHIPPED, *FEATURES, EVERYTHING, *LIMITS)
