"""An API server accepts every rendered object and drops no field."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.charts.rendering import Object, Rendered, ValueSet, render, run_helm
from tests.charts.schemas import VERSIONS, problems
from tests.charts.value_sets import ALL, CPU, FEATURES

pytestmark = pytest.mark.slow
ROUTES = next(value_set for value_set in FEATURES if value_set.name == "routes")

_seen: set[str] = set()


def new_objects(release: Rendered) -> list[Object]:
    """Return the objects that no earlier value set has rendered."""
    unseen_objects = []
    for resource in release.all_objects:
        text = json.dumps(resource, sort_keys=True)
        if text not in _seen:
            _seen.add(text)
            unseen_objects.append(resource)
    return unseen_objects


def test_there_are_enough_value_sets() -> None:
    assert len(ALL) >= 20
    assert len({value_set.name for value_set in ALL}) == len(ALL)


@pytest.mark.parametrize("chosen", ALL, ids=lambda value_set: value_set.name)
def test_helm_lint_reports_nothing(chosen: ValueSet) -> None:
    result = run_helm("lint", chosen, "--strict", "--quiet")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("chosen", ALL, ids=lambda value_set: value_set.name)
def test_every_object_is_valid(chosen: ValueSet) -> None:
    for resource in new_objects(render(chosen)):
        for version in VERSIONS:
            assert problems(resource, version) == []


def _replace_value(resource: Object, value: Any, *path: Any) -> Object:
    changed = copy.deepcopy(resource)
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
def test_mistakes_in_a_ray_job_are_detected(value: Any, path: tuple[Any, ...]) -> None:
    ray_job = render(CPU).ray_job
    assert problems(ray_job, VERSIONS[0]) == []
    assert problems(_replace_value(ray_job, value, *path), VERSIONS[0]) != []


def test_violations_of_cel_rules_are_detected() -> None:
    route = render(ROUTES).find("HTTPRoute")
    twice = _replace_value(route, route["spec"]["parentRefs"] * 2, "spec", "parentRefs")
    assert problems(route, VERSIONS[0]) == []
    assert any("sectionName" in problem for problem in problems(twice, VERSIONS[0]))
