"""Unmodified environments of OpenEnv run next to OpenEnv's published packages.

`make test` uses the newest version, `make conformance` also the older ones.
"""

import json

import pytest

from tests.env.upstream_sdk import run_with_upstream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GUESSER = "openenv:upstream_environments:GuessEnvironment"
ASYNC_GUESSER = "openenv:upstream_environments:AsyncGuessEnvironment"
ONE_THREAD = "openenv:upstream_environments:OneThreadEnvironment"
APP = "openenv:upstream_environments:app"
TOOLS = "openenv:upstream_tools_environment:ToolsEnvironment"
SUM = "openenv:upstream_dataclass_environment:SumEnvironment"
SUM_APP = "openenv:upstream_dataclass_environment:app"


def describe_environment(version: str, *targets: str) -> dict:
    process = run_with_upstream(version, "upstream_adapter_program.py", *targets)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


OLD_VERSIONS = [pytest.param(text, marks=pytest.mark.conformance) for text in ("0.2.1", "0.3.0")]


@pytest.fixture(scope="module", params=[*OLD_VERSIONS, "0.10.0"])
def output(request: pytest.FixtureRequest) -> dict:
    return describe_environment(request.param, GUESSER, ASYNC_GUESSER, ONE_THREAD, APP, TOOLS)


@pytest.mark.parametrize("target", [GUESSER, ASYNC_GUESSER, ONE_THREAD, APP])
def test_environment_passes_all_checks_in_process_and_over_the_wire(output, target: str) -> None:
    assert output[target]["broken"] == {}
    assert output[target]["broken_on_wire"] == {}


@pytest.mark.parametrize("target", [GUESSER, ASYNC_GUESSER, APP])
def test_truncated_and_terminated_episodes_differ(output, target: str) -> None:
    reset_step, *steps = output[target]["played"]
    assert reset_step[1] is None
    assert reset_step[4] == {"reset_reward": 0.0}
    assert reset_step[0]["hint"] == "guess"
    assert [step[3] for step in steps] == [False, False, False, False, True]
    assert not any(step[2] for step in steps)


@pytest.mark.parametrize("target", [GUESSER, ASYNC_GUESSER, APP])
def test_last_step_reports_success_from_metadata(output, target: str) -> None:
    reset_step, *steps = output[target]["played"]
    assert [step[5] for step in (reset_step, *steps)] == [None] * 5 + [False]


def test_schemas_and_state_match_the_upstream_types(output) -> None:
    schema = output[GUESSER]["action_schema"]
    assert schema["properties"]["number"]["maximum"] == 9
    assert schema["required"] == ["number"]
    assert set(output[GUESSER]["observation_schema"]["properties"]) == {
        "metadata",
        "hint",
        "thread",
    }
    assert output[GUESSER]["state"] == {"episode_id": "E", "step_count": 0, "secret": 3}


def test_single_session_class_is_limited_to_one_session_per_process(output) -> None:
    assert output[ASYNC_GUESSER]["second"] == "CAPACITY_REACHED"
    assert output[GUESSER]["second"] is None


def test_all_steps_run_in_the_thread_named_after_the_target(output) -> None:
    for target in (GUESSER, ONE_THREAD):
        threads = {step[0]["thread"] for step in output[target]["played"][1:]}
        assert threads == {f"openenv {target}"}


def test_tools_are_listed_and_called_and_unknown_tools_fail(output) -> None:
    assert output[TOOLS]["tools"] == ["echo"]
    assert output[TOOLS]["echo"] == {"result": "hi"}
    assert output[TOOLS]["no_tool"] == "TOOL_ERROR"
    assert output[TOOLS]["listed"][0]["name"] == "echo"
    assert output[TOOLS]["played"][1][0]["result"]["data"] == "hi"
    assert output[TOOLS]["broken_on_wire"] == {}


@pytest.mark.conformance
def test_openenv_0_1_dataclass_environments_pass_all_checks() -> None:
    output = describe_environment("0.1.1", SUM, SUM_APP)
    for target in (SUM, SUM_APP):
        assert output[target]["broken"] == {}
        assert output[target]["broken_on_wire"] == {}
        totals = [step[0]["total"] for step in output[target]["played"]]
        assert totals == [0, 4, 8, 12]
        assert output[target]["played"][-1][2]
        assert output[target]["state"]["total"] == 0
