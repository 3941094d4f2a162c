"""Network flows that a release's NetworkPolicies allow, and flows in the diagram of the docs.

pods, policies     --> compute_allowed_flows() --+
docs/kubernetes.md --> read_diagram_flows()    --+--> {(source, target): ports}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tests.charts.rendering import ROOT, RenderedRelease

DOCS_PAGE = ROOT / "docs" / "kubernetes.md"
Flows = dict[tuple[str, str], frozenset[str]]
ANY_PORT = frozenset({"any"})
Labels = dict[str, str]
Policy = dict[str, Any]


def read_diagram_flows() -> Flows:
    """Return the flows in the diagram."""
    diagram = DOCS_PAGE.read_text(encoding="utf-8").split("```mermaid")[1].split("```")[0]
    arrow_matches = re.findall(r"^ *(\w+) -->\|([^|]+)\| (\w+)$", diagram, re.MULTILINE)
    return {
        (source, target): frozenset(ports.split(", ")) for source, ports, target in arrow_matches
    }


def compute_allowed_flows(release: RenderedRelease) -> Flows:
    """Return the flows that the policies allow, including flows to and from other systems.

    Raises:
        AssertionError: the policies of a flow's source and target allow different ports.
    """
    pods = {name: labels for name, labels in _iterate_pods(release)}
    flows: Flows = {}
    for name, labels in pods.items():
        for peer_name, peer_labels in pods.items():
            egress_ports = _find_ports(release, labels, "egress", peer_labels)
            ingress_ports = _find_ports(release, peer_labels, "ingress", labels)
            assert egress_ports == ingress_ports, (
                f"{name} may send {set(egress_ports)} to {peer_name}, "
                f"which accepts {set(ingress_ports)}"
            )
            if egress_ports:
                flows[name, peer_name] = egress_ports
        for direction in ("ingress", "egress"):
            for outside_name, ports in _iterate_outside_flows(release, labels, direction):
                endpoints = (name, outside_name) if direction == "egress" else (outside_name, name)
                flows[endpoints] = flows.get(endpoints, frozenset()) | ports
    return flows


def may_connect(policies: Sequence[Policy], source: Labels, target: Labels) -> bool:
    """Return whether the specifications of policies let one pod connect to another on any port."""
    return all(
        any(
            not rule.get("ports") and _selects(peer["podSelector"], peer_labels)
            for policy in policies
            if _selects(policy["podSelector"], labels)
            for rule in policy.get(direction) or ()
            for peer in rule.get(peer_field, ())
            if peer.keys() == {"podSelector"}
        )
        for labels, peer_labels, direction, peer_field in (
            (source, target, "egress", "to"),
            (target, source, "ingress", "from"),
        )
    )


def list_policies(release: RenderedRelease, labels: Labels) -> list[Policy]:
    """Return the policies that apply to a pod with these labels."""
    return [
        policy for policy in _iterate_policies(release) if _selects(policy["podSelector"], labels)
    ]


def _iterate_pods(release: RenderedRelease) -> Iterator[tuple[str, Labels]]:
    for _, metadata, _ in release.iterate_pods():
        labels = metadata["labels"]
        component = labels["app.kubernetes.io/component"]
        is_head = labels.get("ludus.dev/group") == "head"
        yield ("head" if is_head else "workers") if component == "trainer" else component, labels


def _iterate_policies(release: RenderedRelease) -> Iterator[Policy]:
    for resource in release.list_kind("NetworkPolicy"):
        yield resource["spec"]
    for resource in release.list_kind("SandboxTemplate"):
        labels = resource["spec"]["podTemplate"]["metadata"]["labels"]
        yield {"podSelector": {"matchLabels": labels}, **resource["spec"]["networkPolicy"]}


def _selects(selector: dict[str, Any], labels: Labels) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "DoesNotExist"
        if expression["key"] in labels:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def _iterate_rules(
    release: RenderedRelease, labels: Labels, direction: str
) -> Iterator[tuple[Any, frozenset[str]]]:
    peer_field = {"egress": "to", "ingress": "from"}[direction]
    for policy in list_policies(release, labels):
        for rule in policy.get(direction) or ():
            ports = frozenset(str(port["port"]) for port in rule.get("ports", ())) or ANY_PORT
            for peer in rule.get(peer_field, [{}]):
                yield peer, ports


def _find_ports(
    release: RenderedRelease, labels: Labels, direction: str, peer_labels: Labels
) -> frozenset[str]:
    ports: frozenset[str] = frozenset()
    for peer, rule_ports in _iterate_rules(release, labels, direction):
        if peer.keys() == {"podSelector"} and _selects(peer["podSelector"], peer_labels):
            ports |= rule_ports
    return ports


def _iterate_outside_flows(
    release: RenderedRelease, labels: Labels, direction: str
) -> Iterator[tuple[str, frozenset[str]]]:
    for peer, ports in _iterate_rules(release, labels, direction):
        if peer.keys() == {"podSelector"}:
            continue
        (name,) = (
            name
            for name, outside_peer, required_ports in _iterate_outside_peers(
                release.value_set.all_values["networkPolicy"]
            )
            if outside_peer == peer and required_ports in (None, ports)
        )
        yield name, ports


def _iterate_outside_peers(
    network: dict[str, Any],
) -> Iterator[tuple[str, dict[str, Any], frozenset[str] | None]]:
    """Yield the name in the diagram, the peer and the ports of each external component.

    The ports are None unless several components may have the same addresses.
    """
    names_by_key = {"clients": "clients", "prometheus": "prometheus", "rayOperator": "operator"}
    for key, name in names_by_key.items():
        for peer in network[key]:
            yield name, peer, None
    for peer in network["dns"]["to"]:
        yield "dns", peer, None
    for cidr in network["apiServer"]["cidrs"]:
        yield "api", {"ipBlock": {"cidr": cidr}}, frozenset(map(str, network["apiServer"]["ports"]))
    for rule in network["runs"]:
        for peer in rule.get("to", [{}]):
            yield "storage", peer, frozenset(str(port["port"]) for port in rule["ports"])
