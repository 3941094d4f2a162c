"""Rollout functions of TRL's in a rollout worker: a real engine, a real server, a real port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from ludus.env.client import AsyncEnvClient
from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.proto.config import run_config_from
from ludus.proto.errors import ConfigError, RolloutFunctionError
from ludus.trainer.compat.trl import generate_rollout_completions
from ludus.trainer.core.types import (
    GroupSpec,
    RolloutGroup,
    RolloutStatus,
    Sampling,
    ScoringRequest,
)
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.rollout.batch.arguments import RolloutTrainer, TrainerState, with_overrides
from ludus.trainer.rollout.batch.completions import Call, Completions
from ludus.trainer.rollout.batch.generate_port import GeneratePort
from ludus.trainer.rollout.generator import Generator
from ludus.trainer.rollout.group_player import GroupPlayer, WorkerParts, make_group_player
from ludus.trainer.rollout.player import sampling_of
from ludus.trainer.rollout.reward_models import RewardModels
from tests.rollout import batch_functions
from tests.rollout.engine_pair import TOLERANCE, make_folder, make_transformers_engine

G = 4
SPECS = [GroupSpec(0, "blackjack", (5,) * G), GroupSpec(1, "blackjack", (6,) * G)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_folder(tmp_path_factory.mktemp("model"), tie_embeddings=False)


def config(function: str, environment: Any = (), **rollout: Any) -> Any:
    return run_config_from(
        {
            "environment": {
                "package": "openspiel_env",
                "options": {"game": "blackjack"},
                "rollout": f"trl:tests.rollout.batch_functions:{function}",
                "rewards": [{"function": "tests.rollout.batch_functions:by_length"}],
                **dict(environment),
            },
            "rollout": {"group_size": G, "max_completion_tokens": 5, "max_tokens": 64, **rollout},
        },
        [],
    )


class Worker:
    """What a rollout worker has of it."""

    def __init__(self, run: Any, player: GroupPlayer, generator: Generator, port: int) -> None:
        self.run = run
        self.player = player
        self.generator = generator
        self.port = port

    async def groups(self) -> list[RolloutGroup]:
        """Two groups, played in one call."""
        return await self.player.play_groups(SPECS, sampling_of(self.run.rollout), [2, 0])


@pytest.fixture
def worker(model_path: str, client: AsyncEnvClient) -> Any:
    @asynccontextmanager
    async def started(function: str, **rollout: Any) -> AsyncIterator[Worker]:
        run = config(function, **rollout)
        chat = ChatTokenizer(load_tokenizer(model_path))
        generator = Generator(make_transformers_engine(model_path))
        completions = Completions(generator, chat, run.rollout.max_tokens, run.seed, 0)
        port = GeneratePort(completions, 0)
        await port.start()
        try:
            parts = WorkerParts(generator, chat, RewardModels(), completions, port.port)
            player = await make_group_player(run, "blackjack", client, parts)
            yield Worker(run, player, generator, port.port)
        finally:
            await port.stop()
            generator.close()

    batch_functions.SEEN.clear()
    return started


async def played(worker: Any, function: str, **rollout: Any) -> list[RolloutGroup]:
    async with worker(function, **rollout) as up:
        return await up.groups()


async def reason(worker: Any, function: str, **rollout: Any) -> str:
    """Why all episodes have failed."""
    groups = await played(worker, function, **rollout)
    rollouts = [one for group in groups for one in group.rollouts]
    assert {one.status for one in rollouts} == {RolloutStatus.FAILED}
    assert {one.reward for one in rollouts} == {None}
    [found] = {one.failure for one in rollouts}
    return found


async def test_all_three_forms_play_the_same_groups(worker: Any) -> None:
    groups = [
        await played(worker, function) for function in ("once", "once_with_images", "repeated")
    ]
    assert groups[0] == groups[1] == groups[2]
    assert [group.index for group in groups[0]] == [0, 1]
    rollouts = [one for group in groups[0] for one in group.rollouts]
    assert [one.seed for one in rollouts] == [5] * G + [6] * G
    assert len({tuple(one.sequences[0].token_ids.tolist()) for one in rollouts}) == 2 * G
    assert all(one.reward == one.episode_return for one in rollouts)


async def test_logprobs_are_the_engines_and_every_sampled_token_is_trained_on(worker: Any) -> None:
    async with worker("once") as up:
        for group in await up.groups():
            for rollout in group.rollouts:
                [sequence] = rollout.sequences
                [turn] = sequence.turns
                assert turn.end == len(sequence.token_ids)
                ids = sequence.token_ids.tolist()
                prompt = ScoringRequest(ids[: turn.start], ids[turn.start :])
                [right] = await up.generator.score([prompt])
                found = sequence.logprobs[turn.start :].tolist()
                assert found == pytest.approx(right, abs=TOLERANCE)


async def test_what_the_environment_says_between_answers_is_not_trained_on(worker: Any) -> None:
    groups = await played(worker, "two_answers")
    for rollout in (one for group in groups for one in group.rollouts):
        [sequence] = rollout.sequences
        assert rollout.reward == 3.0
        assert [turn.end - turn.start <= 2 for turn in sequence.turns] == [True, True]
        said = sequence.turns[0].end
        assert (sequence.token_ids[said], sequence.logprobs[said]) == (7, 0.0)
        assert not sequence.loss_mask[said]


async def test_rows_are_written_down_as_they_were_said(worker: Any) -> None:
    groups = await played(worker, "two_answers")
    assert [len(group.transcripts) for group in groups] == [2, 0]
    first, second = groups[0].transcripts[0].turns
    assert [said.role for said in first.shown] == ["user"]
    assert [said.role for said in second.shown] == ["environment"]
    assert groups[0].transcripts[0].reward == 3.0


async def test_a_function_gets_prompts_once_or_repeated_with_what_it_samples_by(
    worker: Any,
) -> None:
    await played(worker, "once")
    prompts, args = batch_functions.SEEN[0]
    assert (len(prompts), args.num_generations, args.max_completion_length) == (2, G, 5)
    assert (args.temperature, args.top_p, args.top_k, args.min_p) == (1.0, 1.0, 0, None)
    with pytest.raises(AttributeError, match="got 'learning_rate', which this run does not have"):
        _ = args.learning_rate
    batch_functions.SEEN.clear()
    await played(worker, "repeated")
    prompts, trainer = batch_functions.SEEN[0]
    assert (len(prompts), trainer.args.num_generations) == (2 * G, G)
    assert prompts[0] == prompts[G - 1] != prompts[G]
    assert trainer.state.global_step == 0


async def test_an_environment_may_have_limits_of_its_own(worker: Any) -> None:
    async with worker("once", environment={"max_completion_tokens": 2}) as up:
        for group in await up.groups():
            assert max(rollout.num_tokens_sampled for rollout in group.rollouts) <= 2
    assert batch_functions.SEEN[0][1].max_completion_length == 2


async def test_rewards_are_asked_once_for_all_groups_of_a_call(worker: Any) -> None:
    await played(worker, "repeated")
    [columns] = [seen for seen in batch_functions.SEEN if isinstance(seen, dict)]
    assert len(columns["completions"]) == 2 * G
    assert columns["completions"][0][0]["role"] == "assistant"
    assert columns["seed"] == [5] * G + [6] * G


async def test_a_function_that_takes_the_worker_down_its_own_road_is_told_why(worker: Any) -> None:
    assert "without ['logprobs']" in await reason(worker, "without_logprobs")
    assert "raised ZeroDivisionError: no luck (in raises, batch_functions.py" in await reason(
        worker, "raises"
    )
    assert "raised SystemExit: 3 (in exits, batch_functions.py" in await reason(worker, "exits")
    assert "trainer.model is not here" in await reason(worker, "asks_for_the_model")
    assert "got -0.0010; return the engine's log-probs" in await reason(worker, "invented_logprobs")
    assert "row 0 (prompt 0, completion 0): expected log-prob" in await reason(
        worker, "other_tokens"
    )
    assert "was sampled with temperature = 0.5, and the run trains on temperature = 1" in (
        await reason(worker, "at_another_temperature")
    )
    late = await reason(worker, "takes_too_long", group_timeout_s=0.2)
    assert "expected to end within rollout.group_timeout_s = 0.2 s" in late


async def test_an_evaluation_plays_each_seed_once_and_is_worth_its_rewards(worker: Any) -> None:
    async with worker("once") as up:
        sampling = replace(sampling_of(up.run.rollout), temperature=0.0)
        seeds = [2**31 + number for number in range(5)]
        rollouts = await up.player.play_games(seeds, sampling)
        prompts, args = batch_functions.SEEN[0]
    assert [rollout.seed for rollout in rollouts] == seeds
    assert (len(prompts), args.num_generations, args.temperature) == (5, 1, 0.0)
    assert all(isinstance(rollout.episode_return, float) for rollout in rollouts)


async def test_the_port_answers_as_a_server_of_trl_and_refuses_what_it_does_not_know(
    worker: Any,
) -> None:
    async with worker("once") as up, httpx.AsyncClient(timeout=60) as http:
        url = f"http://127.0.0.1:{up.port}/generate/"
        asked = {"prompts": ["hard 16", [5, 9, 11]], "n": 3, "max_tokens": 4, "top_k": -1}
        answer = (await http.post(url, json=asked)).json()
        assert {key: len(value) for key, value in answer.items()} == {
            "prompt_ids": 2,
            "completion_ids": 6,
            "logprobs": 6,
        }
        assert answer["prompt_ids"][1] == [5, 9, 11]
        for ids, logprobs in zip(answer["completion_ids"], answer["logprobs"], strict=True):
            assert len(ids) == len(logprobs) <= 4
        greedy = {"prompts": ["hard 16"], "n": 2, "max_tokens": 3, "temperature": 0}
        ids = (await http.post(url, json=greedy)).json()["completion_ids"]
        assert ids[0] == ids[1]
        refused = await http.post(url, json={"prompts": ["a"], "best_of": 3})
        assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (
            422,
            ["body", "best_of"],
        )
        too_long = await http.post(url, json={"prompts": [[1] * 64]})
        assert "rollout.max_tokens = 64, got one of 64" in too_long.json()["detail"]
        endless = (await http.post(url, json={"prompts": [[5, 9]], "max_tokens": 10**9})).json()
        assert 0 < len(endless["completion_ids"][0]) <= 62
        too_large = await http.post(url, content=b" " * (MAX_MESSAGE_BYTES + 1))
        assert (too_large.status_code, too_large.json()["detail"]) == (
            413,
            f"expected at most {MAX_MESSAGE_BYTES} bytes",
        )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompts": ["a", "b"], "n": 8193}, "16384 completions of one request, got 2 prompts"),
        ({"prompts": ["a"], "n": 10**18}, "1 prompts times n = 1000000000000000000; send several"),
        ({"prompts": ["a"] * 16_385}, "got 16385 prompts times n = 1; send several requests"),
        ({"prompts": [[5, 10**6]]}, "below 277, the size of the vocabulary, got 1000000 at place"),
        ({"prompts": [[-1]]}, "got -1 at place 0"),
        ({"prompts": ["a"], "temperature": 1e-300}, "temperature must be 0, or a number"),
        ({"prompts": ["a"], "top_p": 1e-300}, "top_p must be a number from"),
        ({"prompts": ["a"], "repetition_penalty": 1e300}, "repetition_penalty must be"),
    ],
)
async def test_a_request_that_would_fail_the_engine_is_refused_and_the_engine_lives(
    worker: Any, asked: dict[str, Any], message: str
) -> None:
    async with worker("once") as up, httpx.AsyncClient(timeout=60) as http:
        url = f"http://127.0.0.1:{up.port}/generate/"
        refused = await http.post(url, json=asked)
        assert refused.status_code == 422 and message in refused.json()["detail"]
        assert (await http.post(url, json={"prompts": ["hard 16"]})).status_code == 200


def test_overrides_and_prompts_that_no_engine_takes_are_refused_by_name(model_path: str) -> None:
    sampling = Sampling(1.0, 8)
    assert with_overrides(sampling, {"temperature": None, "max_new_tokens": 3}).max_tokens == 3
    assert with_overrides(sampling, {"top_k": -1}) == sampling
    for overrides, message in (
        ({"temperature": "hot"}, "generation_overrides: temperature must be 0, or a"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of 1 or more"),
        ({"top_p": 0}, "top_p must be a number from"),
        ({"min_p": float("nan")}, "min_p must be a number from 0 to 1"),
    ):
        with pytest.raises(RolloutFunctionError, match=message):
            with_overrides(sampling, overrides)
    chat = ChatTokenizer(load_tokenizer(model_path))
    completions = Completions(None, chat, 64, 0, 0)  # type: ignore[arg-type]  # never asked
    with pytest.raises(RolloutFunctionError, match=r"as_chat = False expected .* got messages"):
        completions.prompt_ids([{"role": "user", "content": "a"}], as_chat=False)
    nothing: Any = None
    args = SimpleNamespace(num_generations=1, max_completion_length=8)
    state = TrainerState(0)
    trainer = RolloutTrainer(
        *(args, chat.tokenizer, state, [], sampling, completions), Call([0]), nothing
    )
    with pytest.raises(RolloutFunctionError, match=r"got the text 'hard 16'; write \[prompt\]"):
        generate_rollout_completions(trainer, "hard 16")


async def test_a_port_that_is_taken_is_another_workers(model_path: str) -> None:
    chat = ChatTokenizer(load_tokenizer(model_path))
    completions = Completions(None, chat, 64, 0, 0)  # type: ignore[arg-type]  # never asked
    first = GeneratePort(completions, 0)
    second = GeneratePort(completions, first.port)
    assert second.port not in (0, first.port)


def test_a_run_is_refused_whose_episodes_nobody_judges() -> None:
    run = {"environment": {"rollout": "trl:m:f", "rewards": [{"function": "m:r"}]}}
    assert run_config_from(run, []).environment.plays_in_batches
    with pytest.raises(ConfigError, match="every term of rewards needs a function"):
        run_config_from({"environment": {"rollout": "trl:m:f"}}, [])
    with pytest.raises(ConfigError, match="gives every episode a different prompt"):
        run_config_from(run, ["rollout.group_seed=independent"])
