"""`check_environment` reports the faults of bad environments, and always finishes."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ludus.env import Tool, ToolError
from ludus.env.check import check_environment
from ludus.env.check.check import MAX_TIMEOUTS
from ludus.env.check.forked_rules import MAX_OUTPUT_BYTES, run_forked
from ludus.env.limits import MAX_RESULT_BYTES
from ludus.env.types import Transition
from ludus.proto.errors import ConfigError
from tests.env.counting_env import CountingEnv, CountingRenderer

ROOT = Path(__file__).parents[2]
CREATION_RULE = "it_can_be_created_and_closed"
ENCODING_RULE = "results_can_be_encoded"
TYPES_RULE = "flags_and_rewards_have_their_types"
SAME_EPISODE_RULE = "same_seed_and_actions_give_the_same_episode"
ODD_TEXTS_RULE = "odd_texts_are_parsed_or_refused"
RULE_TIMEOUT_S = 1.0


def hang() -> None:
    while True:
        time.sleep(60)


def raise_error(error) -> None:
    raise error


class FaultyRenderer(CountingRenderer):
    """A counting renderer whose methods can be replaced."""

    def __init__(self, overrides) -> None:
        self._overrides = overrides

    def render(self, observation, *, first):
        messages = super().render(observation, first=first)
        return self._overrides.get("render", lambda value: value)(messages)

    def parse(self, text, observation):
        if "parse" in self._overrides:
            self._overrides["parse"](text)
        return super().parse(str(text), observation)

    def legal_answers(self, observation):
        answers = super().legal_answers(observation)
        return self._overrides.get("answers", lambda value: value)(answers)


class BadEnv(CountingEnv):
    """A counting environment with overrides, which map a method's correct result to another."""

    steps_on_event_loop = False

    def __init__(self, **overrides) -> None:
        super().__init__()
        self._overrides = overrides
        self.text_renderer = FaultyRenderer(overrides)
        self._override("init", None)

    def _override(self, method_key, correct_value):
        return self._overrides.get(method_key, lambda value: value)(correct_value)

    def reset(self, *, seed=None):
        return self._override("reset", super().reset(seed=seed))

    def step(self, action):
        return self._override("step", super().step(action))

    @property
    def state(self):
        return self._override("state", super().state)

    @property
    def tools(self):
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return self._override("tools", [Tool("note", "Keeps a note.", schema)])

    def call_tool(self, name, arguments):
        if name != "note":
            raise ToolError("expected note")
        return self._override("call", {"kept": arguments})

    def close(self) -> None:
        self._override("close", None)


def find_faults(timeout_s: float = RULE_TIMEOUT_S, **overrides):
    """Check an environment with overrides, and return the details of broken rules by name."""
    report = check_environment(
        partial(BadEnv, **overrides), seeds=range(2), num_steps=5, timeout_s=timeout_s
    )
    return {check.name: check.detail for check in report.checks if check.verdict == "broken"}


def test_correct_environment_passes() -> None:
    assert find_faults() == {}


def make_reward_override(reward):
    def replace_reward(transition):
        return Transition(transition.observation, reward, terminated=transition.terminated)

    return replace_reward


def make_tensors_override(tensors):
    return lambda transition: Transition(transition.observation, tensors=tensors)


def make_metadata_override(num_bytes: int):
    def add_metadata(transition):
        metadata = {"padding": "x" * num_bytes}
        return Transition(transition.observation.model_copy(update={"metadata": metadata}))

    return add_metadata


@pytest.mark.parametrize(
    ("overrides", "rule", "message"),
    [
        ({"answers": lambda _: [1, 2]}, ENCODING_RULE, "legal_answers must be a list of strings"),
        ({"answers": lambda _: ["ADD", b"2"]}, ENCODING_RULE, "legal_answers must be a list of"),
        (
            {"step": make_tensors_override({"a": [1, 2]})},
            ENCODING_RULE,
            "tensor 'a' must be a NumPy array",
        ),
        (
            {"step": make_tensors_override({"a": np.array([object()])})},
            ENCODING_RULE,
            "dtype object",
        ),
        pytest.param(
            {"reset": make_metadata_override(MAX_RESULT_BYTES)},
            ENCODING_RULE,
            f"more than {MAX_RESULT_BYTES} bytes",
            marks=pytest.mark.slow,
        ),
        ({"render": lambda _: [{"role": "user", "content": 1}]}, "text_is_chat_messages", "1"),
        (
            {"step": make_reward_override(float("nan"))},
            TYPES_RULE,
            "or None, got nan",
        ),
        (
            {"step": make_reward_override(float("inf"))},
            TYPES_RULE,
            "or None, got inf",
        ),
        (
            {"step": make_reward_override(1e308)},
            TYPES_RULE,
            "between -1e+12 and 1e+12, or None, got 1e+308",
        ),
        ({"step": make_reward_override("much")}, TYPES_RULE, "a float or None, got 'much'"),
        ({"step": make_reward_override(True)}, TYPES_RULE, "a float or None, got True"),
        (
            {"step": lambda transition: make_reward_override(random.random())(transition)},
            SAME_EPISODE_RULE,
            "the same episode",
        ),
        ({"parse": int}, ODD_TEXTS_RULE, "ValueError"),
        ({"state": lambda _: None}, "the_state_fits_its_schema", "a state of type"),
        ({"tools": lambda _: [Tool("note", "", {"type": 3})]}, "tools_are_described", "schema"),
        ({"tools": lambda _: ["note"]}, "tools_are_described", "tools of type"),
        ({"tools": lambda _: None}, "tools_are_described", "TypeError"),
        ({"call": lambda _: {1, 2}}, "tools_return_json_objects", "a JSON object"),
        ({"call": lambda _: {"a": object()}}, "tools_return_json_objects", "object"),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_wrong_result_breaks_the_expected_rule(overrides, rule: str, message) -> None:
    faults = find_faults(**overrides)
    assert message in faults[rule]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("\ud800 is not valid text"),
        GeneratorExit(),
        asyncio.CancelledError(),
        SystemExit(7),
        KeyboardInterrupt(),
        StopIteration(),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    ("method_key", "rule"),
    [
        ("init", CREATION_RULE),
        ("close", CREATION_RULE),
        ("reset", SAME_EPISODE_RULE),
        ("step", SAME_EPISODE_RULE),
        ("render", "text_is_chat_messages"),
        ("call", "tools_return_json_objects"),
    ],
)
def test_raised_error_breaks_the_expected_rule(method_key: str, rule: str, error) -> None:
    faults = find_faults(**{method_key: lambda _: raise_error(error)})
    assert f"expected no error, got {type(error).__name__}" in faults[rule]
    assert "".join(faults.values()).isprintable()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method_key", "rule", "method"),
    [
        ("init", CREATION_RULE, "__init__"),
        ("close", CREATION_RULE, "close"),
        ("reset", "reset_has_no_reward", "reset"),
        ("step", TYPES_RULE, "step"),
        ("render", ENCODING_RULE, "render"),
        ("parse", TYPES_RULE, "parse"),
        ("answers", TYPES_RULE, "legal_answers"),
        ("state", "the_state_fits_its_schema", "state"),
        ("tools", "tools_are_described", "tools"),
        ("call", "tools_return_json_objects", "call_tool"),
    ],
)
def test_method_that_never_returns_is_reported_by_name(
    method_key: str, rule: str, method: str
) -> None:
    faults = find_faults(**{method_key: lambda _: hang()})
    assert f"the rule did not end within {RULE_TIMEOUT_S:g} s: {method} (" in faults[rule]
    assert f"{__file__}, line " in faults[rule]
    assert len(faults) <= MAX_TIMEOUTS


@pytest.mark.slow
def test_remaining_rules_are_not_tried_after_too_many_timeouts() -> None:
    report = check_environment(partial(BadEnv, reset=lambda _: hang()), timeout_s=0.2)
    verdicts = [check.verdict for check in report.checks]
    assert verdicts[: 1 + MAX_TIMEOUTS] == ["ok"] + ["broken"] * MAX_TIMEOUTS
    assert set(verdicts[1 + MAX_TIMEOUTS :]) == {"not tried"}
    assert report.checks[-1].detail == "3 rules did not end"


@pytest.mark.parametrize(
    ("exit_process", "message"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (os.abort, "SIGABRT"),
        (lambda: os.write(1, b"out of luck") and os._exit(4), "'out of luck'"),
    ],
)
def test_process_exit_breaks_only_one_rule(exit_process, message) -> None:
    # A busy machine may take seconds to stop a process of this size.
    faults = find_faults(timeout_s=60.0, call=lambda _: exit_process())
    assert list(faults) == ["tools_return_json_objects"]
    assert message in faults["tools_return_json_objects"]


@pytest.mark.slow
def test_excessive_output_is_assigned_to_the_rule_that_caused_it() -> None:
    end_reader, end_writer = os.pipe()

    def flood():
        for _ in range(MAX_OUTPUT_BYTES // 1000 + 2):
            sys.stdout.write("flood" * 200)
        return ""

    def signal_end():
        os.write(end_writer, b".")
        return ""

    outcomes = run_forked((lambda: "", lambda: "", flood, signal_end), timeout_s=60.0)
    faults = [next(outcomes).fault]
    os.read(end_reader, 1)
    faults += [outcome.fault for outcome in outcomes]
    os.close(end_reader)
    os.close(end_writer)
    assert [bool(fault) for fault in faults] == [False, False, True, False]
    assert f"at most {MAX_OUTPUT_BYTES} bytes of output" in faults[2]


def test_excessive_output_is_reported_and_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    def flood(result):
        for _ in range(MAX_OUTPUT_BYTES // 1000 + 2):
            sys.stdout.write("flood" * 200)
        return result

    faults = find_faults(call=flood)
    assert list(faults) == ["tools_return_json_objects"]
    assert f"at most {MAX_OUTPUT_BYTES} bytes of output" in faults["tools_return_json_objects"]
    assert "'floodflood" in faults["tools_return_json_objects"]
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_endless_output_is_stopped() -> None:
    def flood(_) -> None:
        while True:
            os.write(1, b"flood" * 1000)

    assert "bytes of output" in find_faults(init=flood)[CREATION_RULE]


PROGRAM_CODE = """
import asyncio, gc, sys
gc.disable()  # keep the session's garbage until the process forks
from ludus.env.check.forked_rules import run_forked
from ludus.env.serving.loopback import open_client
from tests.env.counting_env import CountingEnv

async def play():
    async with open_client(CountingEnv) as client:
        session, _ = await client.open(seed=1)
        await session.close()

def collect_garbage():
    gc.collect()
    return ""

asyncio.run(play())
[outcome] = run_forked([collect_garbage], timeout_s=20.0)
sys.exit(outcome.fault or 0)
"""


@pytest.mark.slow
def test_forked_rule_survives_garbage_of_earlier_grpc_sessions() -> None:
    # Run a separate program, because gRPC's engine never stops in the process of the tests.
    command = [sys.executable, "-c", PROGRAM_CODE]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert process.returncode == 0, process.stderr


def test_no_rules_are_tried_if_the_environment_cannot_be_created() -> None:
    report = check_environment(partial(BadEnv, init=lambda _: raise_error(ValueError("no"))))
    assert report.checks[0].detail == "expected no error, got ValueError: no"
    assert {check.verdict for check in report.checks[1:]} == {"not tried"}


def test_config_error_of_the_environment_is_raised_not_reported() -> None:
    with pytest.raises(ConfigError, match="no such board"):
        check_environment(partial(BadEnv, init=lambda _: raise_error(ConfigError("no such board"))))
