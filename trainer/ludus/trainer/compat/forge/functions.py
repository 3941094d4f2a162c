"""Functions as Forge's users write them, as those that a run of Ludus calls."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env import Message

RewardTerm = Callable[..., Awaitable[list[float]]]
GroupFunction = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Functions:
    """What a program puts in the place of parts of a run; None leaves a part as it is."""

    reward: Any = None
    compute_advantages: Any = None
    render: Callable[..., Any] | None = None
    parse: Callable[..., Any] | None = None

    @property
    def of_environment(self) -> dict[str, Any]:
        """Fields of an environment's section."""
        rewards = None if self.reward is None else [{"function": reward_term(self.reward)}]
        fields = {"rewards": rewards, "render": self.render, "parse": self.parse}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def of_algorithm(self) -> dict[str, Any]:
        """Fields of section `algorithm`, with those that they replace as if nothing was said."""
        if self.compute_advantages is None:
            return {}
        replaced = {"baseline": "mean", "scale": "none", "credit": "episode"}
        return {"advantages": group_advantages(self.compute_advantages), **replaced}


NO_FUNCTIONS = Functions()


def reward_term(reward: Any) -> RewardTerm:
    """A term of the reward that asks `evaluate_response(prompt, response, game_reward)`.

    Args:
        reward: that function, or a class or an object that has it.
    """
    evaluate = _method(reward, "evaluate_response")

    async def evaluate_response(
        prompts: Sequence[list[Message]],
        completions: Sequence[list[Message]],
        episode_return: Sequence[float],
    ) -> list[float]:
        """What each episode is worth, by its first prompt, its last answer and its return."""
        asked = zip(prompts, completions, episode_return, strict=True)
        said = [
            evaluate(prompt=_text(prompt), response=_last_answer(answers), game_reward=paid)
            for prompt, answers, paid in asked
        ]
        return [float(await one if inspect.isawaitable(one) else one) for one in said]

    return evaluate_response


def group_advantages(compute_advantages: Any) -> GroupFunction:
    """The function of a group that `compute(group)` is.

    Args:
        compute_advantages: that function, or a class or an object that has it.
    """
    compute = _method(compute_advantages, "compute")

    def compute_of(group: Sequence[Any]) -> Any:
        return compute(group)

    return compute_of


def _method(owner: Any, name: str) -> Callable[..., Any]:
    owner = owner() if inspect.isclass(owner) else owner
    found: Callable[..., Any] = getattr(owner, name, owner)
    return found


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _last_answer(messages: Sequence[Message]) -> str:
    return next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
