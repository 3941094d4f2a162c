"""Episodes of random legal actions for checks; they can be repeated and interleaved."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ludus.env.contract.schema import draw_action
from ludus.env.encoding import decode_action
from ludus.env.environment import AnyEnvironment
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.types import Action, Observation, Transition

ActionSource = Callable[[AnyEnvironment, Observation, random.Random], Action]


@dataclass
class CheckedEnvironment:
    """The environment under check, and the settings of its episodes."""

    factory: EnvironmentFactory
    seeds: Sequence[int]
    num_steps: int
    choose_action: ActionSource
    allows_one_instance: bool = False
    """True if a process can have only one instance; set when the first instance is created."""
    _instances: list[AnyEnvironment] = field(default_factory=list)

    def make(self) -> AnyEnvironment:
        """Create an instance, after closing the previous one if a process can have only one."""
        if self._instances and self.allows_one_instance:
            self.close()
        self._instances.append(self.factory())
        self.allows_one_instance = self._instances[-1].one_per_process
        return self._instances[-1]

    def close(self) -> None:
        """Close all instances."""
        while self._instances:
            self._instances.pop().close()

    def play(
        self, seed: int | None, plan: Sequence[Action] | None = None, *, policy_seed: int = 0
    ) -> CheckedEpisode:
        """Play an episode with the actions, or with random legal actions, and return it."""
        episode = CheckedEpisode(self, seed, plan, policy_seed)
        while episode.advance():
            pass
        return episode


class CheckedEpisode:
    """An episode that takes one step per `advance`, so that episodes can be interleaved."""

    def __init__(
        self,
        subject: CheckedEnvironment,
        seed: int | None,
        plan: Sequence[Action] | None = None,
        policy_seed: int = 0,
    ) -> None:
        self.environment = subject.make()
        self.actions: list[Action] = []
        self.transitions = [self.environment.reset(seed=seed)]
        self._subject = subject
        self._plan = plan
        # A string seed, so that an environment with random.Random(seed) does not share the stream.
        self._generator = random.Random(f"policy {policy_seed}")

    @property
    def record(self) -> list[bytes]:
        """Transitions of the episode as JSON, for comparison."""
        return [encode_record(transition) for transition in self.transitions]

    @property
    def is_over(self) -> bool:
        """True if the environment ended the episode."""
        return self.transitions[-1].terminated or self.transitions[-1].truncated

    def advance(self) -> bool:
        """Take a step and return True, or return False at the end."""
        num_steps = self._subject.num_steps if self._plan is None else len(self._plan)
        if self.is_over or len(self.actions) >= num_steps:
            return False
        if self._plan is None:
            observation = self.transitions[-1].observation
            action = self._subject.choose_action(self.environment, observation, self._generator)
        else:
            action = self._plan[len(self.actions)]
        self.actions.append(action)
        self.transitions.append(self.environment.step(action))
        return True


def encode_record(transition: Transition[Any]) -> bytes:
    """Encode observation, reward, flags and tensors as JSON with sorted keys."""
    return orjson.dumps(
        {
            "observation": transition.observation.model_dump(mode="json"),
            "reward": transition.reward,
            "terminated": transition.terminated,
            "truncated": transition.truncated,
            "success": transition.success,
            "tensors": {name: array.tolist() for name, array in transition.tensors.items()},
        },
        option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS,
    )


def draw_legal_action(
    environment: AnyEnvironment, observation: Observation, generator: random.Random
) -> Action:
    """Draw an action from the legal answers, from `legal_actions`, or from the schema.

    Raises:
        InvalidCallError: an action that fits the schema does not fit the action type.
    """
    renderer = environment.text_renderer
    answers = renderer.legal_answers(observation) if renderer is not None else []
    if renderer is not None and answers:
        action: Action = renderer.parse(generator.choice(answers), observation)
        return action
    action_type = environment.action_type
    observation_json = observation.model_dump(mode="json")
    action_fields = draw_action(action_type.model_json_schema(), observation_json, generator)
    return decode_action(action_type, orjson.dumps(action_fields))
