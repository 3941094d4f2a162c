"""Programs of coding_env in its image, with each isolation of the chart."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from coding_env.problems import write_solution
from tests.cluster.gateway_client import connect_client
from tests.cluster.installed import Release, find_skip_reason, helm, install, kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
ISOLATIONS = ("inline", "pool", "process")
"""Isolations of the chart. Each is the name of an environment with this isolation."""
REFUSED_PROGRAMS = (
    "open('/tmp/note', 'w')",
    "open('/run/ludus/token').read()",
    "open('/run/ludus/server-key').read()",
    "import os\nos.listdir('/tmp')",
    "import os\nos.fork()",
    "import socket\nsocket.socket()",
    "import subprocess\nsubprocess.run(['true'])",
)
VALUES = {
    "image": {"tag": "dev"},
    "auth": {"existingSecret": "ludus-auth"},
    "gateway": {"replicas": 1, "drainSeconds": 5, "resources": {"requests": {"cpu": "20m"}}},
    "environments": {
        isolation: {
            "image": {"repository": "ludus/env-coding"},
            "package": "coding_env",
            "options": {"max_turns": len(REFUSED_PROGRAMS) + 1},
            "capacity": 8,
            "drainSeconds": 1,
            "server": {"isolation": isolation, "numWorkers": 1 if isolation == "pool" else None},
            "resources": {"requests": {"cpu": "20m", "memory": "128Mi"}},
        }
        for isolation in ISOLATIONS
    },
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    values_path = tmp_path_factory.mktemp("coding") / "values.json"
    values_path.write_text(json.dumps(VALUES), encoding="utf-8")
    with install([values_path]) as release:
        yield release


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_programs_are_run_and_confined(release: Release, isolation: str) -> None:
    async with connect_client(release, isolation) as client:
        session, transition = await client.open(seed=1)
        for program in REFUSED_PROGRAMS:
            observation = (await session.step({"code": program})).observation
            assert observation["exit_code"] == 1, (program, observation)
            assert "PermissionError" in observation["stderr"], (program, observation)
        task = transition.observation
        solution = write_solution(task["problem"], task["parameters"])
        transition = await session.step({"code": f"print('ready')\n{solution}"})
        assert transition.observation["stdout"] == "ready\n"
        assert (transition.reward, transition.terminated, transition.success) == (1.0, True, True)
        await session.close()


def test_helm_test_plays_an_environment_with_few_sessions(release: Release) -> None:
    options = ("--namespace", release.namespace, "--filter", "name=ludus-test-pool")
    assert "Succeeded" in helm("test", release.name, *options, "--timeout", "600s")


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_the_working_folder_of_a_server_contains_no_module(
    release: Release, isolation: str
) -> None:
    command = ("exec", f"deployment/ludus-env-{isolation}", "-c", "environment", "--")
    listing = kubectl("-n", release.namespace, *command, "find", ".", "-name", "*.py")
    assert listing == ""
