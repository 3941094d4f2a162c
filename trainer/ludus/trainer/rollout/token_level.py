"""Episodes of token-level environments, where a step is a token and no chat template is between.

    tokens that the environment shows --> answer, sampled as a whole --> steps, token by token
              ^                                                             |
              +----- shown again, with what the environment has put in -----+

`play_tokens` is a rollout function for `ludus.env.adapters.gymnasium.token_level`. Every token has
the reward of its own step. What was sampled beyond the end of the episode was never played, and
is left out.
"""

from __future__ import annotations

from ludus.env import StepResult
from ludus.env.client import AsyncSession
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.rollout.conversation import Conversation
from ludus.trainer.rollout.environment_adapter import status_of
from ludus.trainer.rollout.episode import Ended


async def play_tokens(
    session: AsyncSession, first: StepResult, conversation: Conversation
) -> Ended:
    """How the episode ended; reward functions may ask for what its last info says.

    Raises:
        ValueError: the environment shows other tokens than those that it was given.
    """
    result, known = first, list[int]()
    status: RolloutStatus | None = None
    while status is None:
        shown: list[int] = result.observation["token_ids"]
        if shown[: len(known)] != known:
            raise ValueError(
                f"expected observations that begin with the {len(known)} tokens so far and go on "
                "from there, got others; a language model's state only grows"
            )
        conversation.add_tokens(shown[len(known) :])
        if not conversation.has_room:
            status = RolloutStatus.TRUNCATED
            break
        token_ids = await conversation.answer_tokens()
        result = await session.step(action={"token_ids": token_ids})
        rewards: list[float] = result.observation["rewards"]
        conversation.earn(rewards)
        known = [*shown, *token_ids[: len(rewards)]]
        status = status_of(result)
    return Ended(status, result.info, success=result.success)
