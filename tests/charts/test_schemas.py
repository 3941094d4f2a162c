"""Every object that the chart renders is one that an API server takes, whole."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.charts.rendering import Object, Rendered, ValueSet, rendered, run_helm
from tests.charts.schemas import VERSIONS, problems
from tests.charts.value_sets import ALL, CPU, FEATURES

pytestmark = pytest.mark.slow
ROUTES = next(one for one in FEATURES if one.name == "routes")

_seen: set[str] = set()


def new_objects(release: Rendered) -> list[Object]:
    """Those that no other value set has rendered alike."""
    fresh = []
    for one in release.everything:
        text = json.dumps(one, sort_keys=True)
        if text not in _seen:
            _seen.add(text)
            fresh.append(one)
    return fresh


def test_there_are_enough_value_sets() -> None:
    assert len(ALL) >= 20
    assert len({one.name for one in ALL}) == len(ALL)


@pytest.mark.parametrize("chosen", ALL, ids=lambda one: one.name)
def test_helm_lint_has_nothing_to_say(chosen: ValueSet) -> None:
    done = run_helm("lint", chosen, "--strict", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("chosen", ALL, ids=lambda one: one.name)
def test_every_object_is_valid(chosen: ValueSet) -> None:
    for one in new_objects(rendered(chosen)):
        for version in VERSIONS:
            assert problems(one, version) == []


def _changed(found: Object, value: Any, *path: Any) -> Object:
    changed = copy.deepcopy(found)
    below = changed
    for key in path[:-1]:
        below = below[key]
    below[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("7", ("spec", "rayClusterSpec", "workerGroupSpecs", 0, "maxReplicas")),
        (1, ("spec", "rayClusterSpec", "workerGroupSpecs", 0, "priorty")),
        (1, ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "restartPolice")),
        ("me", ("spec", "rayClusterSpec", "managedBy")),
        ({}, ("spec", "deletionStrategy")),
    ],
)
def test_mistakes_in_a_ray_job_are_seen(value: Any, path: tuple[Any, ...]) -> None:
    ray_job = rendered(CPU).ray_job
    assert problems(ray_job, VERSIONS[0]) == []
    assert problems(_changed(ray_job, value, *path), VERSIONS[0]) != []


def test_rules_in_cel_are_seen() -> None:
    route = rendered(ROUTES).one("HTTPRoute")
    twice = _changed(route, route["spec"]["parentRefs"] * 2, "spec", "parentRefs")
    assert problems(route, VERSIONS[0]) == []
    assert any("sectionName" in one for one in problems(twice, VERSIONS[0]))
