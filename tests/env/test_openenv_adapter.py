"""Environments that were written for OpenEnv run unchanged, beside its own published packages.

`make test` has its newest version, `make conformance` the older ones too.
"""

import json

import pytest

from tests.env.upstream_sdk import run_beside_upstream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GUESS = "openenv:upstream_environments:GuessEnvironment"
ASYNC_GUESS = "openenv:upstream_environments:AsyncGuessEnvironment"
ONE_THREAD = "openenv:upstream_environments:OneThreadEnvironment"
APP = "openenv:upstream_environments:app"
TOOLS = "openenv:upstream_tools_environment:ToolsEnvironment"
SUM = "openenv:upstream_dataclass_environment:SumEnvironment"
SUM_APP = "openenv:upstream_dataclass_environment:app"


def told_by(version: str, *targets: str) -> dict:
    ended = run_beside_upstream(version, "upstream_adapter_program.py", *targets)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


OLDER = [pytest.param(version, marks=pytest.mark.conformance) for version in ("0.2.1", "0.3.0")]


@pytest.fixture(scope="module", params=[*OLDER, "0.10.0"])
def told(request: pytest.FixtureRequest) -> dict:
    return told_by(request.param, GUESS, ASYNC_GUESS, ONE_THREAD, APP, TOOLS)


@pytest.mark.parametrize("target", [GUESS, ASYNC_GUESS, ONE_THREAD, APP])
def test_an_environment_keeps_every_rule_in_process_and_over_the_wire(told, target: str) -> None:
    assert told[target]["broken"] == {}
    assert told[target]["broken_on_wire"] == {}


@pytest.mark.parametrize("target", [GUESS, ASYNC_GUESS, APP])
def test_a_truncated_episode_is_told_apart_from_a_terminated_one(told, target: str) -> None:
    first, *steps = told[target]["played"]
    assert first[1] is None
    assert first[4] == {"reset_reward": 0.0}
    assert first[0]["hint"] == "guess"
    assert [step[3] for step in steps] == [False, False, False, False, True]
    assert not any(step[2] for step in steps)


@pytest.mark.parametrize("target", [GUESS, ASYNC_GUESS, APP])
def test_the_end_succeeds_where_its_metadata_say_so(told, target: str) -> None:
    first, *steps = told[target]["played"]
    assert [step[5] for step in (first, *steps)] == [None] * 5 + [False]


def test_schema_state_and_models_are_those_of_the_foreign_types(told) -> None:
    schema = told[GUESS]["action_schema"]
    assert schema["properties"]["number"]["maximum"] == 9
    assert schema["required"] == ["number"]
    assert set(told[GUESS]["observation_schema"]["properties"]) == {"metadata", "hint", "thread"}
    assert told[GUESS]["state"] == {"episode_id": "E", "step_count": 0, "secret": 3}


def test_a_class_that_allows_one_session_gets_one_in_a_process(told) -> None:
    assert told[ASYNC_GUESS]["second"] == "CAPACITY_REACHED"
    assert told[GUESS]["second"] is None


def test_each_environment_has_its_thread_or_all_share_one(told) -> None:
    for target in (GUESS, ONE_THREAD):
        threads = {step[0]["thread"] for step in told[target]["played"][1:]}
        assert threads == {f"openenv {target}"}


def test_tools_are_offered_called_and_refused(told) -> None:
    assert told[TOOLS]["tools"] == ["echo"]
    assert told[TOOLS]["echo"] == {"result": "hi"}
    assert told[TOOLS]["no_tool"] == "TOOL_ERROR"
    assert told[TOOLS]["listed"][0]["name"] == "echo"
    assert told[TOOLS]["played"][1][0]["result"]["data"] == "hi"
    assert told[TOOLS]["broken_on_wire"] == {}


@pytest.mark.conformance
def test_dataclasses_of_the_first_generation_work_too() -> None:
    told = told_by("0.1.1", SUM, SUM_APP)
    for target in (SUM, SUM_APP):
        assert told[target]["broken"] == {}
        assert told[target]["broken_on_wire"] == {}
        totals = [step[0]["total"] for step in told[target]["played"]]
        assert totals == [0, 4, 8, 12]
        assert told[target]["played"][-1][2]
        assert told[target]["state"]["total"] == 0
