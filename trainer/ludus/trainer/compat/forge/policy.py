"""`trainer.policy`: what is asked of the policy that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.data_models.completion import Completion
from ludus.trainer.driver.policy import Policy

SAMPLING_PARAMETERS = {"n": "num", "temperature": "temperature", "max_tokens": "max_tokens"} | {
    "top_p": "top_p",
    "seed": "seed",
}
"""Of vLLM, by what they are called here."""


class ForgePolicy:
    """The policy, as the rollout workers hold it."""

    def __init__(self, policy: Policy) -> None:
        self.generate = Generation(policy)


class Generation:
    """`policy.generate(...)`, and Forge's `policy.generate.route(...)`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def __call__(
        self,
        prompt: str | Sequence[Message],
        *,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """The answers to a user's words, or to the messages of a conversation.

        Args:
            sampling_params: n, temperature, top_p, max_tokens and seed; what is left out is as in
                the rollouts, and one answer.

        Raises:
            ConfigError: another parameter, or a prompt that leaves no room for an answer.
        """
        return await self._answers(self._policy.prompt_ids(prompt), sampling_params)

    async def route(
        self, prompt: str, *, sampling_params: Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """The answers to a text that went through the chat template already."""
        return await self._answers(self._policy.chat.encode(prompt), sampling_params)

    async def _answers(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any] | None
    ) -> list[Completion]:
        answers = await self._policy.complete(prompt_ids, **own_words(sampling_params or {}))
        text = self._policy.chat.decode_prompt(prompt_ids)
        return [Completion.of(answer, text) for answer in answers]


def own_words(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by their names here.

    Raises:
        ConfigError: one that is not known.
    """
    unknown = sorted(sampling_params.keys() - SAMPLING_PARAMETERS.keys())
    if unknown:
        raise ConfigError(
            f"sampling_params expected {', '.join(SAMPLING_PARAMETERS)}, got {', '.join(unknown)}; "
            "leave those out"
        )
    return {SAMPLING_PARAMETERS[name]: value for name, value in sampling_params.items()}
