"""`check_environment` accepts correct environments and reports the faults of others."""

import random

import pytest

from ludus.env import Tool
from ludus.env.check import EnvironmentCheckError, check_environment
from ludus.env.contract.players import CheckedEnvironment
from ludus.env.types import Transition
from ludus.proto.errors import ActionParseError
from tests.env.counting_env import CountAction, CountingEnv, CountingRenderer, ThreadedCountingEnv
from tests.env.tool_env import ToolEnv


@pytest.mark.slow
@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv, ToolEnv])
def test_correct_environment_passes_every_check(factory) -> None:
    report = check_environment(factory)
    report.raise_if_failed()
    assert report.has_passed
    assert len(report.checks) == 21


class SeedIgnoringEnv(CountingEnv):
    def reset(self, *, seed=None):
        return super().reset(seed=random.SystemRandom().randrange(2**32))


class SingleSeedEnv(CountingEnv):
    def reset(self, *, seed=None):
        return super().reset(seed=None if seed is None else 1)


class GlobalRandomnessEnv(CountingEnv):
    def reset(self, *, seed=None):
        random.seed(seed)
        return super().reset(seed=seed)

    def _observe(self, note=""):
        observation = super()._observe(note)
        return observation.model_copy(update={"luck": random.randrange(1_000_000)})


class RewardedResetEnv(CountingEnv):
    def reset(self, *, seed=None):
        return Transition(super().reset(seed=seed).observation, reward=0.0)


class IntegerTerminatedEnv(CountingEnv):
    def step(self, action: CountAction):
        return Transition(super().step(action).observation, reward=1.0, terminated=0)


class NanRewardEnv(CountingEnv):
    def step(self, action: CountAction):
        return Transition(super().step(action).observation, reward=float("nan"))


class EndlessEnv(CountingEnv):
    def step(self, action: CountAction):
        self._is_over = False
        return super().step(action)


class WrongObservationTypeEnv(CountingEnv):
    def reset(self, *, seed=None):
        observation = super().reset(seed=seed).observation
        return Transition(observation.model_copy(update={"total": "many"}))


class ResetCountingEnv(CountingEnv):
    _num_resets = 0

    def reset(self, *, seed=None):
        self._num_resets += 1
        return super().reset(seed=seed, start=self._num_resets)


class MetadataReadingEnv(CountingEnv):
    def step(self, action: CountAction):
        return super().step(action.model_copy(update={"add": action.add + len(action.metadata)}))


class IllegalAnswersRenderer(CountingRenderer):
    def legal_answers(self, observation):
        return ["ADD 0"]


class IllegalAnswersEnv(CountingEnv):
    text_renderer = IllegalAnswersRenderer()


class GuessingRenderer(CountingRenderer):
    def parse(self, text, observation):
        try:
            return super().parse(text, observation)
        except ActionParseError:
            return CountAction(add=1)


class GuessingEnv(CountingEnv):
    text_renderer = GuessingRenderer()


class UnicodeDigitsRenderer(CountingRenderer):
    def parse(self, text, observation):
        verb, _, number = text.strip().partition(" ")
        if verb != "ADD" or not number.isdigit():
            raise ActionParseError(f"expected ADD and a number, got {text!r}")
        return CountAction(add=int(number))


class UnicodeDigitsEnv(CountingEnv):
    text_renderer = UnicodeDigitsRenderer()


class NoteToolEnv(CountingEnv):
    tool_list = (Tool("note", "Keeps a note."),)

    @property
    def tools(self):
        return list(self.tool_list)

    def call_tool(self, name, arguments):
        return {"kept": arguments} if name == "note" else super().call_tool(name, arguments)


class DuplicateToolEnv(NoteToolEnv):
    tool_list = (Tool("note", "Keeps a note."), Tool("note", "Keeps another."))


class InvalidToolSchemaEnv(NoteToolEnv):
    tool_list = (Tool("note", "Keeps a note.", {"type": "text"}),)


class AnyToolEnv(NoteToolEnv):
    def call_tool(self, name, arguments):
        return {}


class ListResultEnv(NoteToolEnv):
    def call_tool(self, name, arguments):
        return ["kept"] if name == "note" else super().call_tool(name, arguments)


class KeyErrorEnv(NoteToolEnv):
    def call_tool(self, name, arguments):
        return super().call_tool(name, arguments) if name != "note" else {"is": arguments["text"]}


class SecretEnv(CountingEnv):
    """An environment that ends when an action equals a number drawn by random.Random(seed)."""

    text_renderer = None

    def reset(self, *, seed=None):
        self._secret = random.Random(seed).choice([1, 2, 3])
        return super().reset(seed=seed)

    def step(self, action: CountAction):
        transition = super().step(action)
        self._is_over = self._is_over or action.add == self._secret
        return Transition(transition.observation, transition.reward, terminated=self._is_over)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    ("factory", "rule"),
    [
        (SeedIgnoringEnv, "same_seed_and_actions_give_the_same_episode"),
        (SingleSeedEnv, "seeds_are_not_ignored"),
        (GlobalRandomnessEnv, "parallel_episodes_are_independent"),
        (RewardedResetEnv, "reset_has_no_reward"),
        (IntegerTerminatedEnv, "flags_and_rewards_have_their_types"),
        (NanRewardEnv, "flags_and_rewards_have_their_types"),
        (EndlessEnv, "a_step_after_the_end_is_refused"),
        (WrongObservationTypeEnv, "observations_fit_their_schema"),
        (ResetCountingEnv, "a_second_reset_starts_again"),
        (MetadataReadingEnv, "action_metadata_changes_nothing"),
        (IllegalAnswersEnv, "every_legal_answer_is_a_legal_action"),
        (GuessingEnv, "garbage_is_refused"),
        (UnicodeDigitsEnv, "odd_texts_are_parsed_or_refused"),
        (DuplicateToolEnv, "tools_are_described"),
        (InvalidToolSchemaEnv, "tools_are_described"),
        (AnyToolEnv, "an_unknown_tool_is_refused"),
        (ListResultEnv, "tools_return_json_objects"),
        (KeyErrorEnv, "tools_return_json_objects"),
    ],
)
def test_broken_rule_is_reported_by_name(factory, rule: str) -> None:
    report = check_environment(factory, num_steps=20)
    faults = {check.name: check.detail for check in report.checks if check.verdict == "broken"}
    assert rule in faults
    assert faults[rule].startswith("expected ")
    with pytest.raises(EnvironmentCheckError, match=rule):
        report.raise_if_failed()


def test_policy_and_environment_use_different_random_numbers() -> None:
    def choose(environment, observation, generator):
        return CountAction(add=generator.choice([1, 2, 3]))

    checked_env = CheckedEnvironment(SecretEnv, range(20), 50, choose)
    lengths = [len(checked_env.play(seed, policy_seed=seed).actions) for seed in checked_env.seeds]
    assert max(lengths) > 1


class HiddenSeedEnv(CountingEnv):
    """An environment in which an action of 1 gives the same observation for every seed.

    The observation differs for larger actions, and for episodes without a seed.
    """

    text_renderer = None

    def reset(self, *, seed=None):
        self._secret = 1 if seed is None else 2 + seed
        return self._set_luck(super().reset(seed=seed), 0)

    def step(self, action: CountAction):
        return self._set_luck(super().step(action), max(0, action.add - self._secret + 1))

    def _set_luck(self, transition, luck):
        observation = transition.observation.model_copy(update={"luck": luck})
        return Transition(observation, transition.reward, transition.terminated)


def test_seed_check_tries_several_policies() -> None:
    first_draws = []

    def choose(environment, observation, generator):
        first_draws.append(generator.random())
        return CountAction(add=1 if first_draws[-1] == first_draws[0] else 12)

    report = check_environment(
        HiddenSeedEnv,
        num_steps=1,
        choose_action=choose,
        on_check=lambda check: first_draws.clear(),
    )
    report.raise_if_failed()
