"""Functions as Forge's users write them, as those that a run of Ludus calls."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env import Message
from ludus.proto.errors import ConfigError

RewardTerm = Callable[..., Awaitable[list[float | None]]]
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

    Raises:
        ConfigError: it is none, or takes other arguments.
    """
    evaluate = _method(reward, "evaluate_response")
    _check_call(evaluate, "reward", prompt="", response="", game_reward=0.0)

    async def evaluate_response(
        prompts: Sequence[list[Message]],
        completions: Sequence[list[Message]],
        episode_return: Sequence[float],
    ) -> list[float | None]:
        """What each episode is worth, by its first prompt, its last answer and its return."""
        asked = zip(prompts, completions, episode_return, strict=True)
        said = [
            evaluate(prompt=_text(prompt), response=_last_answer(answers), game_reward=paid)
            for prompt, answers, paid in asked
        ]
        worth = [await one if inspect.isawaitable(one) else one for one in said]
        return [None if one is None else float(one) for one in worth]

    return evaluate_response


def group_advantages(compute_advantages: Any) -> GroupFunction:
    """The function of a group that `compute(group)` is.

    Args:
        compute_advantages: that function, or a class or an object that has it.

    Raises:
        ConfigError: it is none, or takes other arguments.
    """
    compute = _method(compute_advantages, "compute")
    _check_call(compute, "compute_advantages", [])

    def compute_of(group: Sequence[Any]) -> Any:
        return compute(group)

    return compute_of


def _method(owner: Any, name: str) -> Callable[..., Any]:
    owner = owner() if inspect.isclass(owner) else owner
    found: Callable[..., Any] = getattr(owner, name, owner)
    return found


def _check_call(function: Any, field: str, *args: Any, **named: Any) -> None:
    """Check that the function can be called so."""
    asked = ", ".join(named) or "group"
    if not callable(function):
        raise ConfigError(
            f"{field} expected a function of ({asked}), or what has it, got {function!r:.60}"
        )
    try:
        inspect.signature(function).bind(*args, **named)
    except ValueError:
        return  # some builtins tell no parameters
    except TypeError as error:
        raise ConfigError(
            f"{field} expected a function of ({asked}), got one to which that is no call: {error}; "
            "name its parameters so"
        ) from None


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _last_answer(messages: Sequence[Message]) -> str:
    return next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
