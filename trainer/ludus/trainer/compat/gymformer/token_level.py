"""Episodes of token-level environments, in which each step takes one token.

    tokens that the environment shows --> completion, sampled at once --> steps, token by token
              ^                                                             |
              +--------- shown again, with tokens that the environment added

`TokenLevelRunner` plays the environments of `ludus.env.adapters.gymnasium.token_level`. No chat
template is used. Every token has the reward of its step. Tokens that were sampled beyond the end of
the episode were never played, and are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludus.env import StepResult
from ludus.env.client import AsyncSession
from ludus.proto.errors import ActionError
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.rollout.adapters.environment_adapter import read_end_status
from ludus.trainer.rollout.conversation import Conversation
from ludus.trainer.rollout.episode import EpisodeEnd, SessionRunner


class TokenConversation(Conversation):
    """A conversation in tokens, without a chat template."""

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Show the policy these tokens before its next completion."""
        self._pending_ids = [*(self._pending_ids or ()), *token_ids]
        if token_ids:
            text = self.chat.decode(list(token_ids))
            self.messages.append({"role": "user", "content": text})

    async def complete_tokens(self) -> list[int]:
        """Sample one completion and return its tokens."""
        await self.complete()
        return list(self.turns[-1].completion.token_ids)

    def keep_rewarded_tokens(self, rewards: Sequence[float]) -> None:
        """Keep one token of the last completion for each reward, and drop the tokens after them."""
        turn = self.turns[-1] if self.turns else None
        num_kept = len(rewards)
        if turn is None or not 1 <= num_kept <= len(turn.completion.token_ids):
            raise ValueError(
                f"got {num_kept} rewards; each of the first tokens of a completion needs one"
            )
        completion = turn.completion
        if num_kept < len(completion.token_ids):
            turn.completion = replace(
                completion,
                token_ids=completion.token_ids[:num_kept],
                logprobs=completion.logprobs[:num_kept],
                has_end_token=False,
            )
            turn.is_cut = False
            turn.text = self.chat.decode(turn.completion.token_ids)
            self.messages[-1]["content"] = turn.text
        turn.reward, turn.token_rewards = sum(rewards), tuple(rewards)

    def _encode_pending_messages(self) -> list[int]:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLevelRunner(SessionRunner[TokenConversation]):
    """A runner that plays each completion token by token."""

    record_class = TokenConversation

    async def play_to_end(
        self, session: AsyncSession, first_result: StepResult, seed: int, record: TokenConversation
    ) -> EpisodeEnd:
        """Play until the episode ends.

        Reward functions receive the info of the last result.
        """
        result, expected_ids = first_result, list[int]()
        status: RolloutStatus | None = None
        while status is None:
            shown_ids: list[int] = result.observation["token_ids"]
            if shown_ids[: len(expected_ids)] != expected_ids:
                raise ValueError(
                    f"the environment changed the {len(expected_ids)} tokens that were already "
                    "shown; an observation of a token-level environment must only grow"
                )
            record.add_tokens(shown_ids[len(expected_ids) :])
            if not record.has_room:
                return EpisodeEnd(
                    RolloutStatus.TRUNCATED, result.info, success=result.success, hit_limit=True
                )
            token_ids = await record.complete_tokens()
            try:
                result = await session.step(action={"token_ids": token_ids})
            except ActionError:
                record.add_reward(self.limits.known_invalid_action_reward)
                return EpisodeEnd(RolloutStatus.INVALID_ACTION)
            rewards: list[float] = result.observation["rewards"]
            record.keep_rewarded_tokens(rewards)
            expected_ids = [*shown_ids, *token_ids[: len(rewards)]]
            status = read_end_status(result)
        return EpisodeEnd(status, result.info, success=result.success)
