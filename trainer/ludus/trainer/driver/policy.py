"""The trained policy, for programs that sample from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from ludus.env import Message
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.actors.processes import Workers
from ludus.trainer.core.streams import Stream, derive_key
from ludus.trainer.core.types import SampledCompletion
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.runner import sampling_settings


@dataclass(frozen=True, slots=True)
class PolicyCompletion:
    """A completion of the policy, as text and as tokens."""

    text: str
    """Text without special tokens."""
    prompt_ids: list[int]
    completion: SampledCompletion


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy that a run trains, with the weights that its rollout workers have loaded."""

    run: LanguageModelRun
    workers: Workers
    tokenizer: ChatTokenizer
    wait_for_weights: Callable[[], Awaitable[None]]
    """Function that waits until the workers have the newest weights."""

    async def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        num: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Return `num` completions of a user message or of a conversation.

        rollout.constrain has no effect, because the prompt belongs to no episode.

        Args:
            temperature: sampling temperature; 0 selects the most likely token. Default: that of
                the rollouts.
            max_tokens: maximum tokens per completion. Default: rollout.max_completion_tokens.
            seed: seed of the random numbers.

        Raises:
            ConfigError: prompt and completion exceed rollout.max_tokens, or an argument is out of
                range.
        """
        completions = await self.complete(
            self.encode_prompt(prompt),
            num=num,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        )
        return [completion.text for completion in completions]

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the tokens of a user message or a conversation, up to the policy's turn."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return self.tokenizer.encode_first_prompt(prompt)

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        num: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[PolicyCompletion]:
        """Return `num` completions of a prompt of tokens; see `generate`.

        Args:
            top_p: probability mass of the tokens to sample from. Default: that of the rollouts.
        """
        if num < 1:
            raise ConfigError(f"num must be 1 or more, got {num}")
        rollout = self.run.rollout
        sampling = sampling_settings(rollout, temperature)
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        if top_p is not None:
            sampling = replace(sampling, top_p=top_p)
        if len(prompt_ids) + sampling.max_tokens > rollout.max_tokens:
            raise ConfigError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for a completion of "
                f"{sampling.max_tokens} tokens within rollout.max_tokens = {rollout.max_tokens}; "
                "shorten the prompt, or lower max_tokens"
            )
        keys = [derive_key(self.run.seed, Stream.ANSWER, seed, index) for index in range(num)]
        await self.wait_for_weights()
        completions = await self.workers.complete(prompt_ids, sampling, keys)
        texts = [self.tokenizer.decode(completion.token_ids) for completion in completions]
        return [
            PolicyCompletion(text, list(prompt_ids), completion)
            for text, completion in zip(texts, completions, strict=True)
        ]
