"""How the checks play: episodes of random legal actions, repeatable and interleavable."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson

from ludus.env.contract.schema import random_action
from ludus.env.encoding import decode_action
from ludus.env.environment import AnyEnvironment
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.types import Action, Observation, Transition

ActionSource = Callable[[AnyEnvironment, Observation, random.Random], Action]


@dataclass
class CheckedEnvironment:
    """The environment under check, and how its episodes are played."""

    factory: EnvironmentFactory
    seeds: Sequence[int]
    num_steps: int
    choose_action: ActionSource
    holds_one: bool = False
    """True when only one instance may live at a time; known once one was made."""
    _made: list[AnyEnvironment] = field(default_factory=list)

    def make(self) -> AnyEnvironment:
        """A new instance, which `close` closes, or the next `make` where a process holds one."""
        if self._made and self.holds_one:
            self.close()
        self._made.append(self.factory())
        self.holds_one = self._made[-1].one_per_process
        return self._made[-1]

    def close(self) -> None:
        """Close every instance that was made."""
        while self._made:
            self._made.pop().close()

    def play(
        self, seed: int | None, actions: Sequence[Action] | None = None, *, policy_seed: int = 0
    ) -> Player:
        """A finished player: of random legal actions, or of the given ones."""
        player = Player(self, seed, actions, policy_seed)
        while player.advance():
            pass
        return player


class Player:
    """One episode, a step per `advance`, so that several can take turns."""

    def __init__(
        self,
        checked: CheckedEnvironment,
        seed: int | None,
        actions: Sequence[Action] | None = None,
        policy_seed: int = 0,
    ) -> None:
        self.environment = checked.make()
        self.actions: list[Action] = []
        self.transitions = [self.environment.reset(seed=seed)]
        self._checked = checked
        self._planned = actions
        # A text: an environment that seeds random.Random(seed) must not share this stream.
        self._generator = random.Random(f"policy {policy_seed}")

    @property
    def record(self) -> list[bytes]:
        """What the episode returned, one JSON object per transition, for comparison."""
        return [record_of(transition) for transition in self.transitions]

    @property
    def is_over(self) -> bool:
        """True when the environment ended the episode."""
        return self.transitions[-1].terminated or self.transitions[-1].truncated

    def advance(self) -> bool:
        """True when a step was taken."""
        num_steps = self._checked.num_steps if self._planned is None else len(self._planned)
        if self.is_over or len(self.actions) >= num_steps:
            return False
        if self._planned is None:
            observation = self.transitions[-1].observation
            action = self._checked.choose_action(self.environment, observation, self._generator)
        else:
            action = self._planned[len(self.actions)]
        self.actions.append(action)
        self.transitions.append(self.environment.step(action))
        return True


def record_of(transition: Transition) -> bytes:
    """Observation, reward, flags and tensors as JSON with sorted keys."""
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


def random_legal_action(
    environment: AnyEnvironment, observation: Observation, generator: random.Random
) -> Action:
    """An action drawn from the legal answers, or from `legal_actions`, or from the schema.

    Raises:
        InvalidCallError: what fits the schema does not fit the action type.
    """
    renderer = environment.text_renderer
    answers = renderer.legal_answers(observation) if renderer is not None else []
    if renderer is not None and answers:
        return renderer.parse(generator.choice(answers), observation)
    action_type = environment.action_type
    shown = observation.model_dump(mode="json")
    action = random_action(action_type.model_json_schema(), shown, generator)
    return decode_action(action_type, orjson.dumps(action))
