"""An API server accepts every rendered object and drops no field."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.charts.rendering import Object, RenderedRelease, ValueSet, render, run_helm
from tests.charts.schemas import VERSIONS, problems
from tests.charts.value_sets import ALL_SETS, CPU_SET, FEATURE_SETS

pytestmark = pytest.mark.slow
ROUTES_SET = next(value_set for value_set in FEATURE_SETS if value_set.name == "routes")

_seen_texts: set[str] = set()


def list_new_objects(release: RenderedRelease) -> list[Object]:
    """Return the objects that no earlier value set has rendered."""
    unseen_objects = []
    for resource in release.all_objects:
        text = json.dumps(resource, sort_keys=True)
        if text not in _seen_texts:
            _seen_texts.add(text)
            unseen_objects.append(resource)
    return unseen_objects


def test_at_least_20_value_sets_have_unique_names() -> None:
    assert len(ALL_SETS) >= 20
    assert len({value_set.name for value_set in ALL_SETS}) == len(ALL_SETS)


@pytest.mark.parametrize("value_set", ALL_SETS, ids=lambda value_set: value_set.name)
def test_helm_lint_reports_no_problem(value_set: ValueSet) -> None:
    result = run_helm("lint", value_set, "--strict", "--quiet")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("value_set", ALL_SETS, ids=lambda value_set: value_set.name)
def test_every_object_is_valid(value_set: ValueSet) -> None:
    for resource in list_new_objects(render(value_set)):
        for version in VERSIONS:
            assert problems(resource, version) == []


def _replace_value(resource: Object, value: Any, *path: Any) -> Object:
    changed_copy = copy.deepcopy(resource)
    node = changed_copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return changed_copy


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
def test_invalid_ray_job_fields_are_detected(value: Any, path: tuple[Any, ...]) -> None:
    ray_job = render(CPU_SET).ray_job
    assert problems(ray_job, VERSIONS[0]) == []
    assert problems(_replace_value(ray_job, value, *path), VERSIONS[0]) != []


def test_cel_rule_violations_are_detected() -> None:
    route = render(ROUTES_SET).find("HTTPRoute")
    duplicated_route = _replace_value(route, route["spec"]["parentRefs"] * 2, "spec", "parentRefs")
    assert problems(route, VERSIONS[0]) == []
    assert any("sectionName" in problem for problem in problems(duplicated_route, VERSIONS[0]))
