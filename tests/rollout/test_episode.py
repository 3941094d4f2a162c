"""An episode over a real server: what is sampled, what is masked, what counts, what is void."""

from __future__ import annotations

import itertools

from ludus.env.client import AsyncEnvClient
from ludus.env.server import EnvServer, ServerOptions
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.episode import Player
from ludus.trainer.rollout.face import ImportedFace, ServerFace
from ludus.trainer.types import Rollout, RolloutStatus, Sampling
from openspiel_env import make_environment
from tests.rollout.scripted_policy import LIMITS, SAMPLING, ScriptedPolicy, make_player


async def play_until_two_turns(client: AsyncEnvClient, chat: ChatTokenizer) -> Rollout:
    """The rollout of the first deal in which one may hit without going bust, then stand."""
    for seed in range(100):
        player, _ = make_player(client, chat, iter(["HIT", "STAND"]))
        rollout = await player.play(seed, SAMPLING)
        if rollout.num_turns == 2:
            return rollout
    raise AssertionError("no such deal")


async def test_exactly_the_sampled_tokens_are_in_the_mask(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rollout = await play_until_two_turns(client, chat)
    pairs = zip(rollout.token_ids, rollout.loss_mask, strict=True)
    sampled = [token for token, is_sampled in pairs if is_sampled]
    assert sampled == chat.answer_ids("HIT") + chat.answer_ids("STAND")
    assert [p for p, m in zip(rollout.logprobs, rollout.loss_mask, strict=True) if m] == [-1.0] * 4
    assert not rollout.loss_mask[0], "the first token of a sequence has no log-prob"


async def test_every_prompt_is_an_exact_prefix_of_the_next(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    for seed in range(20):
        player, policy = make_player(client, chat, itertools.repeat("HIT"))
        rollout = await player.play(seed, SAMPLING)
        for prompt in policy.prompts:
            assert rollout.token_ids[: len(prompt)] == prompt


async def test_text_that_is_no_action_ends_the_episode_at_the_configured_reward(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"invalid_action_reward": -0.7})
    player, _ = make_player(client, chat, iter(["I would rather not"]), limits)
    rollout = await player.play(1, SAMPLING)
    assert (rollout.status, rollout.reward) == (RolloutStatus.INVALID_ACTION, -0.7)


async def test_a_limit_on_turns_truncates_and_frees_the_session(
    server: EnvServer, client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"max_turns": 1})
    statuses = set()
    for seed in range(20):
        player, _ = make_player(client, chat, iter(["HIT"]), limits)
        statuses.add((await player.play(seed, SAMPLING)).status)
    assert statuses == {RolloutStatus.TRUNCATED, RolloutStatus.TERMINATED}
    assert server.core.load.num_sessions == 0


async def test_an_answer_cut_off_goes_on_with_an_unsampled_end_token(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    for seed in range(100):
        player, _ = make_player(client, chat, iter(["HIT...", "STAND"]))
        rollout = await player.play(seed, SAMPLING)
        if rollout.num_turns == 2:
            break
    end = rollout.token_ids.index(chat.end_token_id, rollout.loss_mask.index(True))
    assert not rollout.loss_mask[end]


async def test_an_episode_whose_server_dies_is_void_and_not_a_loss(chat: ChatTokenizer) -> None:
    server = EnvServer(lambda: make_environment(game="blackjack"), ServerOptions(port=0))
    await server.start()
    async with await AsyncEnvClient.connect(server.grpc_address, reconnect_timeout_s=0.2) as client:
        player, policy = make_player(client, chat, itertools.repeat("HIT"))
        answer = policy.__call__

        async def die_first(prompt_ids: list[int], sampling: Sampling):
            await server.stop()
            return await answer(prompt_ids, sampling)

        player = Player(client, die_first, chat, ServerFace(), LIMITS)
        lost = await player.play(1, SAMPLING)
        never_began = await player.play(2, SAMPLING)
    for rollout in (lost, never_began):
        assert (rollout.status, rollout.reward) == (RolloutStatus.LOST, None)


async def test_render_and_parse_of_the_configuration_replace_the_face(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    face = ImportedFace("tests.rollout.test_episode:render", "tests.rollout.test_episode:parse")
    policy = ScriptedPolicy(chat, iter(["1"]))
    rollout = await Player(client, policy, chat, face, LIMITS).play(5, SAMPLING)
    assert rollout.status is RolloutStatus.TERMINATED
    assert "legal: [0, 1]" in chat.decode(policy.prompts[0])


def render(observation: dict[str, object], first: bool) -> list[dict[str, str]]:
    """A face of the test's own."""
    return [{"role": "user", "content": f"legal: {observation['legal_actions']}"}]


def parse(text: str, observation: dict[str, object]) -> dict[str, int]:
    """The action that the text names by number."""
    return {"action_id": int(text)}
