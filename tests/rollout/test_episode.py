"""An episode over a real server: what is sampled, what is masked, what counts, what is void."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from ludus.env.client import AsyncEnvClient
from ludus.env.server import EnvServer, ServerOptions
from ludus.proto.config import RolloutConfig
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.rollout.episode import Player
from ludus.trainer.rollout.face import ImportedFace, ServerFace
from ludus.trainer.rollout.group import group_seeds, play_group
from ludus.trainer.types import GroupSpec, Rollout, RolloutStatus, Sampling
from openspiel_env import make_environment
from tests.rollout.scripted_policy import ScriptedPolicy

SAMPLING = Sampling(temperature=1.0, max_tokens=8)
LIMITS = RolloutConfig(max_completion_tokens=8, max_tokens=256)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[EnvServer]:
    async with EnvServer(lambda: make_environment(game="blackjack"), ServerOptions(port=0)) as up:
        yield up


@pytest_asyncio.fixture
async def client(server: EnvServer) -> AsyncIterator[AsyncEnvClient]:
    async with await AsyncEnvClient.connect(server.grpc_address) as connected:
        yield connected


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(["hard 16 vs 10", "HIT", "STAND"] * 5, 320))


def make_player(
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    script: Iterator[str],
    limits: RolloutConfig = LIMITS,
    on_call: Callable[[], None] | None = None,
) -> tuple[Player, ScriptedPolicy]:
    """A player that answers by script."""
    policy = ScriptedPolicy(chat, script, on_call)
    return Player(client, policy, chat, ServerFace(), limits), policy


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


async def test_same_seed_and_answers_give_the_same_episode(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    player, _ = make_player(client, chat, itertools.repeat("HIT"))
    spec = GroupSpec(0, (11,) * 8)
    group = await play_group(player, spec, SAMPLING, timeout_s=10)
    assert len({(tuple(r.token_ids), r.reward, r.status) for r in group.rollouts}) == 1


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


async def test_episodes_wait_for_each_other_when_the_server_is_full(chat: ChatTokenizer) -> None:
    options = ServerOptions(port=0, max_sessions=2)
    async with (
        EnvServer(lambda: make_environment(game="blackjack"), options) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        player, _ = make_player(client, chat, itertools.repeat("STAND"))
        group = await play_group(player, GroupSpec(0, tuple(range(12))), SAMPLING, timeout_s=20)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.TERMINATED}


async def test_a_group_that_takes_too_long_is_void(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    async def never(prompt_ids: list[int], sampling: Sampling):
        await __import__("asyncio").sleep(60)

    player = Player(client, never, chat, ServerFace(), LIMITS)
    group = await play_group(player, GroupSpec(7, (1, 1)), SAMPLING, timeout_s=0.2)
    assert group.num_lost == 2
    assert group.index == 7


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


def test_groups_have_seeds_of_their_own_below_those_of_evaluations() -> None:
    shared = [group_seeds(3, index, 16, shared=True) for index in range(2000)]
    apart = [group_seeds(3, index, 16, shared=False) for index in range(100)]
    assert all(len(set(seeds)) == 1 for seeds in shared)
    assert len({seeds[0] for seeds in shared}) == 2000
    assert len({seed for seeds in apart for seed in seeds}) == 1600
    assert max(seed for seeds in shared + apart for seed in seeds) < 2**30
    assert group_seeds(3, 5, 4, shared=True) != group_seeds(4, 5, 4, shared=True)
