"""Unmodified OpenEnv environments run with OpenEnv's published packages.

`make test` uses the latest version; `make conformance` also uses older versions.
"""

import json

import pytest

from tests.env.upstream_sdk import run_with_upstream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GUESS_TARGET = "openenv:upstream_environments:GuessEnvironment"
ASYNC_GUESS_TARGET = "openenv:upstream_environments:AsyncGuessEnvironment"
ONE_THREAD_TARGET = "openenv:upstream_environments:OneThreadEnvironment"
APP_TARGET = "openenv:upstream_environments:app"
TOOLS_TARGET = "openenv:upstream_tools_environment:ToolsEnvironment"
SUM_TARGET = "openenv:upstream_dataclass_environment:SumEnvironment"
SUM_APP_TARGET = "openenv:upstream_dataclass_environment:app"


def run_adapter_program(version: str, *targets: str) -> dict:
    process = run_with_upstream(version, "upstream_adapter_program.py", *targets)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


OLDER_VERSIONS = [
    pytest.param(version, marks=pytest.mark.conformance) for version in ("0.2.1", "0.3.0")
]


@pytest.fixture(scope="module", params=[*OLDER_VERSIONS, "0.10.0"])
def output_by_target(request: pytest.FixtureRequest) -> dict:
    return run_adapter_program(
        request.param, GUESS_TARGET, ASYNC_GUESS_TARGET, ONE_THREAD_TARGET, APP_TARGET, TOOLS_TARGET
    )


@pytest.mark.parametrize(
    "target", [GUESS_TARGET, ASYNC_GUESS_TARGET, ONE_THREAD_TARGET, APP_TARGET]
)
def test_environment_passes_all_checks_in_process_and_over_the_wire(
    output_by_target, target: str
) -> None:
    assert output_by_target[target]["broken"] == {}
    assert output_by_target[target]["broken_on_wire"] == {}


@pytest.mark.parametrize("target", [GUESS_TARGET, ASYNC_GUESS_TARGET, APP_TARGET])
def test_episode_at_the_step_limit_is_truncated_and_not_terminated(
    output_by_target, target: str
) -> None:
    reset_step, *steps = output_by_target[target]["played"]
    assert reset_step[1] is None
    assert reset_step[4] == {"reset_reward": 0.0}
    assert reset_step[0]["hint"] == "guess"
    assert [step[3] for step in steps] == [False, False, False, False, True]
    assert not any(step[2] for step in steps)


@pytest.mark.parametrize("target", [GUESS_TARGET, ASYNC_GUESS_TARGET, APP_TARGET])
def test_last_step_reports_success_from_metadata(output_by_target, target: str) -> None:
    reset_step, *steps = output_by_target[target]["played"]
    assert [step[5] for step in (reset_step, *steps)] == [None] * 5 + [False]


def test_schemas_and_state_match_the_upstream_types(output_by_target) -> None:
    schema = output_by_target[GUESS_TARGET]["action_schema"]
    assert schema["properties"]["number"]["maximum"] == 9
    assert schema["required"] == ["number"]
    assert set(output_by_target[GUESS_TARGET]["observation_schema"]["properties"]) == {
        "metadata",
        "hint",
        "thread",
    }
    assert output_by_target[GUESS_TARGET]["state"] == {
        "episode_id": "E",
        "step_count": 0,
        "secret": 3,
    }


def test_single_session_class_is_limited_to_one_session_per_process(output_by_target) -> None:
    assert output_by_target[ASYNC_GUESS_TARGET]["second"] == "CAPACITY_REACHED"
    assert output_by_target[GUESS_TARGET]["second"] is None


def test_all_steps_run_in_the_thread_named_after_the_target(output_by_target) -> None:
    for target in (GUESS_TARGET, ONE_THREAD_TARGET):
        threads = {step[0]["thread"] for step in output_by_target[target]["played"][1:]}
        assert threads == {f"openenv {target}"}


def test_tools_are_listed_and_called_and_unknown_tools_fail(output_by_target) -> None:
    assert output_by_target[TOOLS_TARGET]["tools"] == ["echo"]
    assert output_by_target[TOOLS_TARGET]["echo"] == {"result": "hi"}
    assert output_by_target[TOOLS_TARGET]["no_tool"] == "TOOL_ERROR"
    assert output_by_target[TOOLS_TARGET]["listed"][0]["name"] == "echo"
    assert output_by_target[TOOLS_TARGET]["played"][1][0]["result"]["data"] == "hi"
    assert output_by_target[TOOLS_TARGET]["broken_on_wire"] == {}


@pytest.mark.conformance
def test_openenv_0_1_dataclass_environments_pass_all_checks() -> None:
    output_by_target = run_adapter_program("0.1.1", SUM_TARGET, SUM_APP_TARGET)
    for target in (SUM_TARGET, SUM_APP_TARGET):
        assert output_by_target[target]["broken"] == {}
        assert output_by_target[target]["broken_on_wire"] == {}
        totals = [step[0]["total"] for step in output_by_target[target]["played"]]
        assert totals == [0, 4, 8, 12]
        assert output_by_target[target]["played"][-1][2]
        assert output_by_target[target]["state"]["total"] == 0
