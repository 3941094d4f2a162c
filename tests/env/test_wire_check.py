"""`check_server` with correct servers and with servers that break a rule."""

import random

import pytest

from ludus.env.check import CheckReport, check_server
from ludus.env.client import AsyncEnvClient
from ludus.env.contract.schema import draw_value, find_fault
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.session import EnvironmentSession
from ludus.env.types import Transition
from ludus.proto.errors import CapacityError, ErrorCode
from tests.env.counting_env import CountAction, CountingEnv, ThreadedCountingEnv
from tests.env.served import WIRES, serve, server_address


async def check_wire(
    factory=CountingEnv, wire: str = "grpc", max_sessions=6, **options
) -> CheckReport:
    async with (
        serve(factory, max_sessions=max_sessions) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        return await check_server(client, num_steps=8, seeds=range(4), **options)


def get_broken_rules(report: CheckReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if check.verdict == "broken"}


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_correct_server_passes_all_checks(factory, wire: str) -> None:
    report = await check_wire(factory, wire)
    report.raise_if_failed()
    assert len(report.checks) == 18
    assert [check.verdict for check in report.checks] == ["ok"] * 18


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
async def test_single_session_server_does_not_offer_multi_session_rules(wire: str) -> None:
    report = await check_wire(wire=wire, max_sessions=1)
    rule_names = [check.name for check in report.checks if check.verdict == "not offered"]
    assert rule_names == [
        "parallel_sessions_are_independent",
        "a_group_starts_with_equal_observations",
    ]
    assert get_broken_rules(report) == {}


class OpenInstancesEnv(CountingEnv):
    num_open = 0
    max_open = 0

    def __init__(self) -> None:
        super().__init__()
        cls = type(self)
        cls.num_open += 1
        cls.max_open = max(cls.max_open, cls.num_open)

    def close(self) -> None:
        super().close()
        type(self).num_open -= 1


@pytest.mark.slow
async def test_check_opens_at_most_16_sessions_on_a_large_server() -> None:
    report = await check_wire(OpenInstancesEnv, max_sessions=200)
    assert report.has_passed
    assert report.checks[0].verdict == "not offered"
    assert (OpenInstancesEnv.max_open, OpenInstancesEnv.num_open) == (16, 0)


class AnyTextRenderer:
    takes_any_text = True

    def render(self, observation, *, first):
        return [{"role": "user", "content": "Say something."}]

    def parse(self, text, observation):
        return CountAction(add=1)

    def legal_answers(self, observation):
        return []


class UndeclaredRenderer(AnyTextRenderer):
    takes_any_text = False


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("renderer", "rule_prefixes"),
    [(AnyTextRenderer(), set()), (UndeclaredRenderer(), {"malformed"})],
)
async def test_only_renderers_that_declare_any_text_may_accept_any_text(
    wire: str, renderer, rule_prefixes
) -> None:
    environment_type = type("Counting", (CountingEnv,), {"text_renderer": renderer})
    detail_by_rule = get_broken_rules(await check_wire(environment_type, wire))
    assert {name.partition("_")[0] for name in detail_by_rule} == rule_prefixes


class SeedIgnoringEnv(CountingEnv):
    def reset(self, *, seed=None):
        return super().reset(seed=random.SystemRandom().randrange(2**32))


class SharedStateEnv(CountingEnv):
    totals: list[int] = []  # noqa: RUF012 - shared on purpose

    def step(self, action: CountAction):
        self.totals.append(action.add)
        transition = super().step(action)
        luck = len(self.totals)
        return Transition(
            transition.observation.model_copy(update={"luck": luck}),
            transition.reward,
            transition.terminated,
            transition.truncated,
        )


class InvalidObservationEnv(CountingEnv):
    def reset(self, *, seed=None):
        observation = super().reset(seed=seed).observation
        return Transition(observation.model_copy(update={"total": "many"}))


class FailingStepEnv(CountingEnv):
    text_renderer = None

    def step(self, action: CountAction) -> None:
        raise RuntimeError("no")


class RewardedResetEnv(CountingEnv):
    def reset(self, *, seed=None):
        return Transition(super().reset(seed=seed).observation, reward=1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    ("factory", "rule"),
    [
        (SeedIgnoringEnv, "same_seed_and_actions_give_the_same_episode"),
        (SeedIgnoringEnv, "a_group_starts_with_equal_observations"),
        (SharedStateEnv, "parallel_sessions_are_independent"),
        (InvalidObservationEnv, "observations_fit_their_schema"),
        (FailingStepEnv, "actions_of_the_schema_are_accepted_or_refused"),
        (RewardedResetEnv, "flags_and_rewards_are_valid"),
    ],
)
async def test_check_finds_broken_environment_rules_over_the_wire(factory, rule: str) -> None:
    detail_by_rule = get_broken_rules(await check_wire(factory))
    assert rule in detail_by_rule
    assert detail_by_rule[rule].startswith("expected ")


def ignore_step_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    step = EnvironmentSession.step
    monkeypatch.setattr(
        EnvironmentSession, "step", lambda self, action, step_index=0: step(self, action)
    )


def keep_closed_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def close(self, session_id):
        return None

    monkeypatch.setattr(SessionCore, "close", close)


def refuse_with_wrong_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapacityError, "default_code", ErrorCode.SESSION_LOST)


def accept_step_after_end(monkeypatch: pytest.MonkeyPatch) -> None:
    step = EnvironmentSession.step

    def repeat_last_result(self, action, step_index=0):
        last_result = self.last_result
        if last_result is not None and last_result.done:
            return last_result
        return step(self, action, step_index)

    monkeypatch.setattr(EnvironmentSession, "step", repeat_last_result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_rule", "rules"),
    [
        (
            ignore_step_indices,
            {"a_wrong_step_number_is_refused", "a_repeated_step_returns_its_first_result"},
        ),
        (keep_closed_sessions, {"a_closed_session_is_lost"}),
        (refuse_with_wrong_code, {"a_full_server_refuses_with_a_code"}),
        (accept_step_after_end, {"a_step_after_the_end_is_refused"}),
    ],
)
async def test_check_finds_broken_server_rules(
    monkeypatch: pytest.MonkeyPatch, break_rule, rules
) -> None:
    break_rule(monkeypatch)
    detail_by_rule = get_broken_rules(await check_wire(max_sessions=12, timeout_s=10))
    assert rules <= set(detail_by_rule)


@pytest.mark.slow
async def test_check_that_times_out_is_broken_and_other_checks_continue() -> None:
    class HangingEnv(ThreadedCountingEnv):
        def step(self, action: CountAction):
            return super().step(CountAction(add=99))

    report = await check_wire(HangingEnv, timeout_s=0.3)
    assert "did not end within 0.3 s" in get_broken_rules(report)["seeds_are_not_ignored"]
    assert len(report.checks) == 18


def test_capacity_error_has_the_capacity_reached_code() -> None:
    assert CapacityError("full").code == ErrorCode.CAPACITY_REACHED


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"const": "move"},
        "to": {"$ref": "#/$defs/Place"},
        "how": {"anyOf": [{"type": "null"}, {"enum": ["walk", "run"]}]},
        "path": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
        "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "string"}]},
        "note": {"type": "string"},
    },
    "required": ["kind", "to", "how", "path", "pair"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "exclusiveMaximum": 5}},
            "required": ["x"],
        }
    },
}


@pytest.mark.slow
def test_random_values_fit_their_schema() -> None:
    generator = random.Random(1)
    values = [draw_value(SCHEMA, generator) for _ in range(50)]
    assert {find_fault(value, SCHEMA) for value in values} == {""}
    assert len({str(value) for value in values}) == 50


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kind": "stay"}, "kind: 'move' was expected"),
        ({"to": {}}, "to: 'x' is a required property"),
        ({"to": {"x": -1}}, "to.x: -1 is less than the minimum of 0"),
        ({"how": "swim"}, "how: 'swim' is not"),
        ({"path": [1]}, "path: [1] is too short"),
        ({"path": [1, "two"]}, "path.1: 'two' is not of type 'integer'"),
        ({"pair": [1, "a"]}, "pair.0: 1 is not of type 'boolean'"),
        ({"more": 1}, "value: Additional properties are not allowed ('more' was unexpected)"),
    ],
)
def test_schema_mismatch_is_reported_with_the_path(change, fault) -> None:
    valid_value = {"kind": "move", "to": {"x": 1}, "how": None, "path": [1, 2], "pair": [True, "a"]}
    assert find_fault(valid_value, SCHEMA) == ""
    assert fault in find_fault({**valid_value, **change}, SCHEMA)


@pytest.mark.parametrize("schema", [{"$ref": "#/$defs/Nowhere"}, {"type": "number of legs"}])
def test_invalid_schema_is_reported(schema) -> None:
    assert "the JSON schema is not valid" in find_fault(1, schema)
