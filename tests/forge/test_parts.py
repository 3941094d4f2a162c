"""Forge's actors, tested separately and in a custom training loop."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ludus.proto.errors import ConfigError, WeightSyncError
from ludus.trainer.compat.forge.actor_support import make_actor_settings
from ludus.trainer.compat.forge.actors.generator import Generator
from ludus.trainer.compat.forge.actors.reference_model import ReferenceModel
from ludus.trainer.compat.forge.actors.replay_buffer import ReplayBuffer
from ludus.trainer.compat.forge.actors.trainer import RLTrainer
from ludus.trainer.compat.forge.controller.actor import ForgeActor, endpoint
from ludus.trainer.compat.forge.data_models.completion import Completion
from ludus.trainer.compat.forge.grpo import (
    ComputeAdvantages,
    compute_logprobs,
    simple_grpo_loss,
)
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.rollout.engines.vllm_process import is_vllm_installed
from tests.learner.tiny_policy import make_policy_folder

REQUEST_LENGTH, RESPONSE_LENGTH, PAD_ID = 12, 4, 0
PROMPT = "<|user|>hard 16 vs 10<|end|><|assistant|>"


@pytest.fixture(scope="module", autouse=True)
def use_one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(
    params=[
        "transformers",
        pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ]
)
async def policy(request: pytest.FixtureRequest, model_path: str) -> AsyncIterator[Generator]:
    if request.param == "vllm" and not is_vllm_installed():
        pytest.skip("vLLM is not installed")
    # The actor sets environment variables for vLLM; restore them after the test.
    with patch.dict(os.environ):
        actor = await make_generator(model_path, engine=request.param)
        yield actor
        await actor.shutdown()


async def make_generator(model_path: str, *, num_replicas: int = 1, **fields: Any) -> Any:
    options = Generator.options(procs=1, num_replicas=num_replicas, with_gpus=False)
    return await options.as_service(
        engine_args={"model": model_path, "dtype": "float32", "max_model_len": 64},
        sampling_params={"n": 4, "max_tokens": RESPONSE_LENGTH, "temperature": 1.0, "top_p": 1.0},
        **fields,
    )


@pytest.fixture
async def trainer(model_path: str) -> AsyncIterator[RLTrainer]:
    actor = await RLTrainer.options(procs=1, with_gpus=False).as_actor(
        loss=simple_grpo_loss,
        model={"hf_assets_path": f"hf://{model_path}"},
        optimizer={"name": "AdamW", "lr": 1e-2, "weight_decay": 0.0},
        lr_scheduler={"warmup_steps": 1},
        training={"local_batch_size": 16, "seq_len": 64, "steps": 100, "dtype": "float32"},
        parallelism={"data_parallel_shard_degree": 1},
        activation_checkpoint={"mode": "none"},
    )
    yield actor
    await actor.shutdown()


@pytest.mark.slow
async def test_trainer_shutdown_stops_gloo_threads(model_path: str) -> None:
    def count_gloo_threads() -> int:
        return sum("gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))

    num_threads_at_start = count_gloo_threads()
    actor = await RLTrainer.options(procs=1, with_gpus=False).as_actor(
        model={"hf_assets_path": f"hf://{model_path}"}, training={"steps": 2, "dtype": "float32"}
    )
    assert count_gloo_threads() > num_threads_at_start
    await actor.push_weights.call_one(1)
    await actor.shutdown()
    assert count_gloo_threads() <= num_threads_at_start


@dataclass
class Episode:
    completion: Completion
    reward: float = 0.0
    advantage: float = 0.0
    ref_logprobs: Tensor | None = None

    @property
    def policy_version(self) -> int:
        return self.completion.generator_version

    @property
    def tokens(self) -> Tensor:
        request, response = self.completion.prompt_ids, self.completion.token_ids
        left_padding = torch.full((REQUEST_LENGTH - len(request),), PAD_ID)
        right_padding = torch.full((RESPONSE_LENGTH - len(response),), PAD_ID)
        return torch.cat([left_padding, request, response, right_padding])


@dataclass
class VersionedEpisode:
    policy_version: int


def collate(batches: list[list[Episode]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    inputs, targets = [], []
    for batch in batches:
        tokens = torch.stack([episode.tokens for episode in batch])
        response = tokens[:, REQUEST_LENGTH:]
        inputs.append({"tokens": tokens})
        targets.append(
            {
                "response": response,
                "ref_logprobs": torch.stack([e.ref_logprobs for e in batch]),
                "advantages": torch.tensor([[e.advantage] for e in batch]),
                "padding_mask": response != PAD_ID,
            }
        )
    return inputs, targets


async def test_buffer_returns_no_stale_or_duplicate_episode() -> None:
    rng = random.Random("ages of episodes")
    buffer = await ReplayBuffer.options(procs=1).as_actor(batch_size=8, max_policy_age=2, dp_size=2)
    version, sampled_episodes = 0, []
    for _ in range(10_000):
        await buffer.add.call_one(VersionedEpisode(version - rng.randint(0, 4)))
        version += rng.random() < 0.03
        if rng.random() < 0.1:
            batches = await buffer.sample.call_one(curr_policy_version=version)
            for episode in (episode for batch in batches or [] for episode in batch):
                assert version - episode.policy_version <= 2
                sampled_episodes.append(episode)
            assert batches is None or [len(batch) for batch in batches] == [8, 8]
    assert len(set(map(id, sampled_episodes))) == len(sampled_episodes) > 4000


async def test_buffer_returns_none_with_too_few_episodes() -> None:
    buffer = await ReplayBuffer.as_actor(batch_size=2, max_policy_age=0, collate=len)
    await buffer.add.call_one(VersionedEpisode(3))
    assert await buffer.sample.call_one(curr_policy_version=3) is None
    await buffer.add.call_one(VersionedEpisode(3))
    assert await buffer.sample.call_one(curr_policy_version=3, batch_size=3) is None
    assert await buffer.sample.call_one(curr_policy_version=3) == 1, (
        "sample did not return one collated batch"
    )
    assert await buffer.size.call_one() == 0
    with pytest.raises(ConfigError, match="policy_version must be a whole number, got None"):
        await buffer.add.call_one(object())


@pytest.mark.parametrize("size", [{"batch_size": 0}, {"max_policy_age": -1}, {"dp_size": 0}])
async def test_invalid_replay_buffer_size_is_refused(size: dict[str, int]) -> None:
    [(name, value)] = size.items()
    with pytest.raises(ConfigError, match=rf"{name} = {value} must be a whole"):
        await ReplayBuffer.as_actor(**{"batch_size": 2, "max_policy_age": 0, **size})


@pytest.mark.parametrize("rewards", [[], [float("nan"), 1.0], [None, 1.0], ["a"]])
async def test_advantages_need_finite_rewards(rewards: list[Any]) -> None:
    actor = await ComputeAdvantages.as_actor()
    with pytest.raises(ConfigError, match="each episode of a group must have a finite reward"):
        await actor.compute.call_one([SimpleNamespace(reward=reward) for reward in rewards])


async def test_advantages_match_the_example_in_the_docs() -> None:
    actor = await ComputeAdvantages.options(procs=1).as_actor()
    group = [SimpleNamespace(reward=reward) for reward in (1, 0, -1, -1)]
    advantages = await actor.compute.call_one(group)
    assert advantages == pytest.approx([1.3054, 0.2611, -0.7833, -0.7833], abs=2e-4)
    equal_group = [SimpleNamespace(reward=0.1) for _ in range(4)]
    assert await actor.compute.call_one(equal_group) == [0, 0, 0, 0]


@pytest.mark.slow
async def test_reference_generator_and_trainer_logprobs_agree_before_training(
    policy: Generator, trainer: RLTrainer, model_path: str
) -> None:
    reference = await ReferenceModel.options(procs=1, num_replicas=1).as_service(
        model={"hf_assets_path": f"hf://{model_path}"}, training={"dtype": "bfloat16"}
    )
    completions = await policy.generate.route(PROMPT)
    episodes = [Episode(completion) for completion in completions]
    tokens = torch.stack([episode.tokens for episode in episodes])
    ref_logprobs = await reference.forward.route(tokens, REQUEST_LENGTH, return_logprobs=True)
    requests = [
        ScoringRequest(completion.prompt_ids.tolist(), completion.token_ids.tolist())
        for completion in completions
    ]
    rows = trainer.learner.score_completions(requests)
    for row, completion, learner_logprobs in zip(ref_logprobs, completions, rows, strict=True):
        num_tokens = len(completion.token_ids)
        torch.testing.assert_close(
            row[:num_tokens], torch.tensor(learner_logprobs), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(row[:num_tokens], completion.logprobs, atol=1e-5, rtol=0)
    logits = await reference.forward.route(tokens, REQUEST_LENGTH, return_logprobs=False)
    torch.testing.assert_close(compute_logprobs(logits, tokens[:, REQUEST_LENGTH:]), ref_logprobs)


@pytest.mark.slow
async def test_a_custom_training_loop_learns(
    policy: Generator, trainer: RLTrainer, model_path: str
) -> None:
    reference = await ReferenceModel.as_service(model={"hf_assets_path": model_path})
    advantages = await ComputeAdvantages.as_actor()
    buffer = await ReplayBuffer.as_actor(batch_size=16, max_policy_age=0, collate=collate)
    success_rates = []
    for step in range(20):
        group = [
            Episode(completion)
            for completion in await policy.generate.route(
                PROMPT, sampling_params={"n": 16, "max_tokens": 1}
            )
        ]
        for episode in group:
            episode.reward = float(episode.completion.token_ids[0] % 2)
        success_rates.append(sum(episode.reward > 0 for episode in group) / len(group))
        tokens = torch.stack([episode.tokens for episode in group])
        logprobs = await reference.forward.route(tokens, REQUEST_LENGTH)
        group_advantages = await advantages.compute.call_one(group)
        for episode, advantage, row in zip(group, group_advantages, logprobs, strict=True):
            episode.advantage, episode.ref_logprobs = advantage, row
            await buffer.add.call_one(episode)
        inputs, targets = await buffer.sample.call_one(curr_policy_version=step)
        await trainer.train_step.call(inputs, targets)
        await trainer.push_weights.call(step + 1)
        await policy.update_weights.fanout(step + 1)
        assert await policy.get_version.route() == step + 1
    assert sum(success_rates[:3]) < 2.1 and sum(success_rates[-3:]) > 2.7
    with pytest.raises(WeightSyncError, match="weights version 99 is not available"):
        await policy.update_weights.fanout(99)
    # If a user reruns the cells of a notebook, the versions start from 1 again.
    await trainer.push_weights.call(1)
    await policy.update_weights.fanout(1)
    assert await policy.get_version.route() == 1


@pytest.mark.slow
async def test_replicas_alternate_and_sample_like_a_single_generator(model_path: str) -> None:
    single_generator = await make_generator(model_path, seed=3)
    service = await make_generator(model_path, seed=3, num_replicas=2)
    try:
        expected_groups = [await single_generator.generate.route(PROMPT) for _ in range(4)]
        service_groups = [await service.generate.route(PROMPT) for _ in range(4)]
        assert [get_texts(group) for group in service_groups] == [
            get_texts(group) for group in expected_groups
        ]
        assert len(set(map(tuple, map(get_texts, service_groups)))) > 1
        first_replica, second_replica = service.replicas
        assert [
            get_texts(await first_replica.generate(PROMPT)),
            get_texts(await second_replica.generate(PROMPT)),
        ] == [get_texts(await single_generator.generate.route(PROMPT)) for _ in range(2)]
        with pytest.raises(AttributeError, match="'seed' is not an endpoint of this service"):
            service.seed  # noqa: B018
    finally:
        await service.shutdown()
        await single_generator.shutdown()


@pytest.mark.slow
async def test_new_weights_reach_every_replica(model_path: str, trainer: RLTrainer) -> None:
    service = await make_generator(model_path, num_replicas=2)
    try:
        tokens = torch.tensor([[5, 6, 7, 8] * 3 + [9, 10, 11, 12]])
        response = tokens[:, REQUEST_LENGTH:]
        target = {
            "response": response,
            "ref_logprobs": torch.zeros(1, RESPONSE_LENGTH),
            "advantages": torch.ones(1, 1),
            "padding_mask": torch.ones_like(response, dtype=torch.bool),
        }
        old_logprobs = await sample_greedy_logprobs(service)
        await trainer.train_step.call([{"tokens": tokens}], [target])
        await trainer.push_weights.call(7)
        await service.update_weights.fanout(7)
        assert await service.get_version.fanout() == [7, 7]
        new_logprobs = await sample_greedy_logprobs(service)
        torch.testing.assert_close(new_logprobs[0], new_logprobs[1])
        assert not torch.allclose(new_logprobs[0], old_logprobs[0])
        assert {
            completion.generator_version for completion in await service.generate.route(PROMPT)
        } == {7}
    finally:
        await service.shutdown()


async def sample_greedy_logprobs(service: Any) -> list[Tensor]:
    """Return the log-prob of the most likely first token, one per replica."""
    sampling_params = {"n": 1, "temperature": 0.0, "max_tokens": 1}
    groups = await service.generate.fanout(PROMPT, sampling_params=sampling_params)
    return [completion.logprobs for [completion] in groups]


def get_texts(completions: list[Completion]) -> list[str]:
    return [completion.text for completion in completions]


async def test_custom_actor_has_the_call_methods_of_forge() -> None:
    class Doubler(ForgeActor):
        @endpoint
        async def double(self, value: int) -> int:
            return 2 * value

        @endpoint
        def halve(self, value: int) -> float:
            return value / 2

    actor = await Doubler.options(procs=1, with_gpus=True).as_service()
    assert await actor.double.route(2) == await actor.double.call_one(2) == 4
    assert await actor.halve.call(3) == await actor.halve.fanout(3) == [1.5]
    assert actor.halve(5) == 2.5
    with pytest.raises(ConfigError, match="procs = 2 must be 1"):
        Doubler.options(procs=2)
    with pytest.raises(ConfigError, match="not support processes; use procs"):
        Doubler.options(processes=1)
    with pytest.raises(ConfigError, match="num_replicas = -1 must be a whole number of 1 or more"):
        Doubler.options(num_replicas=-1)
    with pytest.raises(ConfigError, match="must be 1 for an actor; call as_service"):
        await Doubler.options(num_replicas=2).as_actor()
    service = await Doubler.options(num_replicas=3).as_service()
    assert await service.halve.fanout(3) == [1.5] * 3 and await service.double.route(2) == 4


@pytest.mark.slow
async def test_unsupported_options_of_actors_are_refused(model_path: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_degree = 2 must be 1"):
        await RLTrainer.as_actor(
            model={"hf_assets_path": model_path}, parallelism={"tensor_parallel_degree": 2}
        )
    with pytest.raises(ConfigError, match="shard_degree = 2 must be 1, because this actor"):
        await RLTrainer.as_actor(
            model={"hf_assets_path": model_path}, parallelism={"data_parallel_shard_degree": 2}
        )
    with pytest.raises(ConfigError, match="num_replicas = 2 must be 1 with vLLM"):
        await make_generator(model_path, engine="vllm", num_replicas=2)
    with pytest.raises(ConfigError, match="a model is required"):
        await ReferenceModel.as_service()
    with pytest.raises(ConfigError, match="does not support top_k"):
        policy = await Generator.as_service(engine_args={"model": model_path})
        try:
            await policy.generate.route(PROMPT, sampling_params={"top_k": 3})
        finally:
            await policy.shutdown()


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("trainer", {"optimizer": {"lr": -1}}, r"^optimizer\.lr = -1 must be a number above 0"),
        ("trainer", {"training": {"seq_len": 1}}, r"^training\.seq_len = 1 must be a whole"),
        ("policy", {"engine_args": {"max_model_len": -4}}, r"^engine_args\.max_model_len = -4"),
    ],
)
def test_invalid_value_is_refused_with_the_field_name(
    section: str, fields: dict[str, dict[str, Any]], message: str
) -> None:
    max_tokens = next(iter(next(iter(fields.values())).values()))
    with pytest.raises(ConfigError, match=message):
        make_actor_settings(section, fields, max_tokens=max_tokens)
