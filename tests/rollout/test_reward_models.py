"""Tests of reward models as reward terms: loading, batches, threads and failures."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ludus.proto.config import RewardModelTerm, RewardTerm, make_run_config
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.core.types import Rollout, RolloutStatus, TokenSequence, TurnSpan
from ludus.trainer.driver.checks import check_critic, check_reward_models, resolve_config
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.reward_model import RewardModel, load_reward_model
from ludus.trainer.rollout.rewards.reward_models import RewardModels
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode, Reward
from tests.learner.tiny_policy import make_policy_folder


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def path(policy_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a reward model with a random head; return its folder."""
    folder = tmp_path_factory.mktemp("reward") / "pleasing"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(policy_path, num_labels=1)
    RewardModel(model, load_tokenizer(policy_path), format="chat").save(folder)
    return str(folder)


def make_episode(text: str, status: RolloutStatus = RolloutStatus.TERMINATED) -> PlayedEpisode:
    """Return an episode of one turn with reward 1 from the environment."""
    sequence = TokenSequence(np.array([1, 2, 3]), np.array([0.0, -1, -1]), (TurnSpan(1, 3, 0),))
    rollout = Rollout("count", 7, (sequence,), 1.0, 1.0, (), status, 0)
    completion = [{"role": "assistant", "content": text}]
    return PlayedEpisode(rollout, [{"role": "user", "content": "go"}], completion, [2, 3])


@pytest.mark.slow
async def test_term_is_the_model_score_of_prompt_and_completion(path: str) -> None:
    terms = [RewardTerm(weight=0.5), RewardModelTerm(path=path, weight=2.0)]
    lost_episode = make_episode("", RolloutStatus.LOST)
    rollouts = await Reward(terms).score(
        [make_episode("HIT"), lost_episode, make_episode("STAND")], 60.0
    )
    model = load_reward_model(path)
    scores = model.score(["go", "go"], ["HIT", "STAND"])
    assert rollouts[0].reward == pytest.approx(0.5 + 2 * scores[0])
    assert rollouts[2].reward == pytest.approx(0.5 + 2 * scores[1])
    assert scores[0] != scores[1]
    assert [term.name for term in rollouts[0].terms] == ["environment", "pleasing"]
    assert [term.value for term in rollouts[1].terms] == [None, None]  # lost, so not scored


@pytest.mark.slow
async def test_model_is_loaded_once_for_all_environments_and_terms(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = RewardModels()
    terms = [RewardModelTerm(path=path), RewardModelTerm(path=path, name="again", weight=-1)]
    rewards = [Reward(terms, reward_models=models) for _ in range(3)]
    assert len(models) == 1
    for reward in rewards:
        [rollout] = await reward.score([make_episode("HIT")], 60.0)
        assert rollout.reward == pytest.approx(0.0)


@pytest.mark.slow
async def test_concurrent_groups_are_scored_in_one_batch(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_sizes: list[int] = []
    thread_ids: set[int] = set()
    original_score = RewardModel.score

    def score_slowly(
        self: RewardModel, prompts: list, completions: list, **settings: int
    ) -> list[float]:
        batch_sizes.append(len(prompts))
        thread_ids.add(threading.get_ident())
        time.sleep(0.05)
        return original_score(self, prompts, completions, **settings)

    monkeypatch.setattr(RewardModel, "score", score_slowly)
    reward = Reward([RewardModelTerm(path=path)])
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            await asyncio.sleep(0.001)
            num_ticks += 1

    tick_task = asyncio.create_task(tick())
    groups = [[make_episode("HIT"), make_episode("STAND " * length)] for length in range(1, 9)]
    rollouts_by_group = await asyncio.gather(*(reward.score(group, 60.0) for group in groups))
    tick_task.cancel()
    # All groups start in one iteration of the event loop, so they need at most two calls.
    assert sum(batch_sizes) == 16
    assert len(batch_sizes) <= 2
    assert num_ticks > 5  # the event loop was not blocked
    assert thread_ids.isdisjoint({threading.get_ident()})
    assert len(thread_ids) == 1
    model = load_reward_model(path)
    for group, rollouts in zip(groups, rollouts_by_group, strict=True):
        completions = [episode.completion[0]["content"] for episode in group]
        expected = original_score(model, ["go", "go"], completions)
        assert [episode.reward for episode in rollouts] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
async def test_failed_or_late_model_voids_one_group_but_not_the_next_group(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = Reward([RewardModelTerm(path=path)])
    original_score = RewardModel.score

    def raise_out_of_memory(self: RewardModel, *args: object, **settings: int) -> list[float]:
        raise RuntimeError("CUDA out of memory")

    def score_after_time_limit(self: RewardModel, *args: object, **settings: int) -> list[float]:
        time.sleep(0.3)
        return [0.0]

    def score_nan(self: RewardModel, *args: object, **settings: int) -> list[float]:
        return [float("nan")]

    def score_huge(self: RewardModel, *args: object, **settings: int) -> list[float]:
        return [1e300]

    for score_function, message, timeout_s in [
        (score_huge, "returned the score 1e+300, which is not a finite number between", 60.0),
        (raise_out_of_memory, "has failed: RuntimeError: CUDA out of memory", 60.0),
        (score_after_time_limit, "did not return within rollout.group_timeout_s = 0.05 s", 0.05),
        (score_nan, "returned the score nan", 60.0),
    ]:
        monkeypatch.setattr(RewardModel, "score", score_function)
        [rollout] = await reward.score([make_episode("HIT")], timeout_s)
        assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
        assert message in rollout.failure
    monkeypatch.setattr(RewardModel, "score", original_score)
    [rollout] = await reward.score([make_episode("HIT")], 60.0)
    assert rollout.status is RolloutStatus.TERMINATED


def test_missing_or_unsuitable_reward_model_is_rejected_early(
    path: str, policy_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_run(path: str) -> None:
        config = {"environment": {"rewards": [{}, {"kind": "model", "path": path}]}}
        check_reward_models(make_run_config(config))

    check_run(path)
    with pytest.raises(
        NotFoundError, match=r"rewards\.path = './nowhere': there is no such folder"
    ):
        check_run("./nowhere")
    with pytest.raises(ConfigError, match="num_labels = 1, got LlamaForCausalLM"):
        check_run(policy_path)
    two_label_model = AutoModelForSequenceClassification.from_pretrained(policy_path, num_labels=2)
    two_label_model.save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match="with num_labels = 2"):
        check_run(str(tmp_path / "two"))


def test_critic_that_is_missing_or_has_another_vocabulary_is_rejected(
    path: str, policy_path: str, tmp_path: Path
) -> None:
    def check_run(critic: str) -> None:
        config = {
            "algorithm": {"kind": "ppo", "critic": {"kind": "model", "path": critic}},
            "model": {"kind": "pretrained", "path": policy_path},
        }
        check_critic(resolve_config(make_run_config(config)))

    check_run(path)
    check_run(policy_path)
    with pytest.raises(
        NotFoundError, match=r"algorithm\.critic\.path = './nowhere': there is no such folder"
    ):
        check_run("./nowhere")
    other_model = AutoModelForSequenceClassification.from_pretrained(policy_path, num_labels=1)
    tokenizer = make_tokenizer(["quite other words than those"] * 20, 285)
    RewardModel(other_model, tokenizer, format="chat").save(tmp_path / "other")
    with pytest.raises(ConfigError, match="must have the vocabulary of the policy"):
        check_run(str(tmp_path / "other"))


def test_resolved_configuration_has_the_absolute_model_path(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(path).parent)
    config = {"environment": {"rewards": [{"kind": "model", "path": "pleasing/"}]}}
    [term] = resolve_config(make_run_config(config)).environment.rewards
    assert isinstance(term, RewardModelTerm)
    assert (term.path, term.name) == (path, "pleasing")


def test_invalid_reward_term_is_rejected_with_the_key() -> None:
    for term, message in [
        ({"kind": "mode", "path": "x"}, "rewards.*kind: expected one of 'function', 'model'"),
        ({"kind": "model"}, "path: required, but not set"),
        ({"kind": "model", "path": "x", "function": "a:b"}, "function: unknown key"),
        ({"path": "x"}, "path: unknown key"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_run_config({"environment": {"rewards": [term]}})
