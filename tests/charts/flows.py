"""Who may talk to whom: by a release's NetworkPolicies, and in the diagram of the docs.

pods, policies     --> allowed()  --+
docs/kubernetes.md --> drawn()    --+--> {(source, target): ports}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.charts.rendering import ROOT, Rendered

PAGE = ROOT / "docs" / "kubernetes.md"
Flows = dict[tuple[str, str], frozenset[str]]
ANY = frozenset({"any"})
Labels = dict[str, str]
Policy = dict[str, Any]


def drawn() -> Flows:
    """The arrows of the diagram, with the ports that stand on them."""
    diagram = PAGE.read_text(encoding="utf-8").split("```mermaid")[1].split("```")[0]
    arrows = re.findall(r"^ *(\w+) -->\|([^|]+)\| (\w+)$", diagram, re.MULTILINE)
    return {(source, target): frozenset(ports.split(", ")) for source, ports, target in arrows}


def allowed(release: Rendered) -> Flows:
    """What the policies let through, between components and from and to the outside.

    Raises:
        AssertionError: one end allows what the other refuses.
    """
    pods = {name: labels for name, labels in _pods(release)}
    found: Flows = {}
    for name, labels in pods.items():
        for other, other_labels in pods.items():
            sent = _ports(release, labels, "egress", other_labels)
            taken = _ports(release, other_labels, "ingress", labels)
            assert sent == taken, (
                f"{name} may send {set(sent)} to {other}, which takes {set(taken)}"
            )
            if sent:
                found[name, other] = sent
        for direction in ("ingress", "egress"):
            for outside, ports in _outside(release, labels, direction):
                ends = (name, outside) if direction == "egress" else (outside, name)
                found[ends] = found.get(ends, frozenset()) | ports
    return found


def policies_of(release: Rendered, labels: Labels) -> list[Policy]:
    """What applies to a pod with such labels."""
    return [one for one in _policies(release) if _selects(one["podSelector"], labels)]


def _pods(release: Rendered) -> Iterator[tuple[str, Labels]]:
    for _, metadata, _ in release.pods():
        labels = metadata["labels"]
        component = labels["app.kubernetes.io/component"]
        is_head = labels.get("ludus.dev/group") == "head"
        yield ("head" if is_head else "workers") if component == "trainer" else component, labels


def _policies(release: Rendered) -> Iterator[Policy]:
    for one in release.of_kind("NetworkPolicy"):
        yield one["spec"]
    for one in release.of_kind("SandboxTemplate"):
        labels = one["spec"]["podTemplate"]["metadata"]["labels"]
        yield {"podSelector": {"matchLabels": labels}, **one["spec"]["networkPolicy"]}


def _selects(selector: dict[str, Any], labels: Labels) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def _rules(
    release: Rendered, labels: Labels, direction: str
) -> Iterator[tuple[Any, frozenset[str]]]:
    end = {"egress": "to", "ingress": "from"}[direction]
    for policy in policies_of(release, labels):
        for rule in policy.get(direction) or ():
            ports = frozenset(str(one["port"]) for one in rule.get("ports", ())) or ANY
            for peer in rule.get(end, [{}]):
                yield peer, ports


def _ports(release: Rendered, labels: Labels, direction: str, other: Labels) -> frozenset[str]:
    ports: frozenset[str] = frozenset()
    for peer, some in _rules(release, labels, direction):
        if peer.keys() == {"podSelector"} and _selects(peer["podSelector"], other):
            ports |= some
    return ports


def _outside(
    release: Rendered, labels: Labels, direction: str
) -> Iterator[tuple[str, frozenset[str]]]:
    for peer, ports in _rules(release, labels, direction):
        if peer.keys() == {"podSelector"}:
            continue
        (name,) = (
            name
            for name, other, its_ports in _ends_outside(release.chosen.all_values["networkPolicy"])
            if other == peer and its_ports in (None, ports)
        )
        yield name, ports


def _ends_outside(
    network: dict[str, Any],
) -> Iterator[tuple[str, dict[str, Any], frozenset[str] | None]]:
    """Peers that are not pods of the release, by the diagram's names; with ports where others may
    have the same addresses."""
    named = {"clients": "clients", "prometheus": "prometheus", "rayOperator": "operator"}
    for key, name in named.items():
        for peer in network[key]:
            yield name, peer, None
    for peer in network["dns"]["to"]:
        yield "dns", peer, None
    for cidr in network["apiServer"]["cidrs"]:
        yield "api", {"ipBlock": {"cidr": cidr}}, frozenset(map(str, network["apiServer"]["ports"]))
    for rule in network["runs"]:
        for peer in rule.get("to", [{}]):
            yield "storage", peer, frozenset(str(one["port"]) for one in rule["ports"])
