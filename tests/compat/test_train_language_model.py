"""`train_agent` with a language model: run settings and a short run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

import ludus.trainer.compat.gymformer.env  # noqa: F401 - registers the environments
from ludus.env.targets.targets import environment_factory
from ludus.proto.config import LanguageModelRun, LocalEnvironment, PpoConfig
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.runs import Transcript, TranscriptMessage, TranscriptTurn
from ludus.trainer.compat.gymformer.env.summarization_env import ARTICLES
from ludus.trainer.compat.gymformer.rl.common_nn import MLPCriticNetwork
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig
from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork, LMCriticNetwork
from ludus.trainer.compat.gymformer.trainer.language_model import make_run, record_returns
from ludus.trainer.compat.gymformer.trainer.request import AgentRequest, EpisodeReturns
from ludus.trainer.compat.gymformer.trainer.token_task import TokenTask
from tests.compat.readme_environment import SummarizationEnv as ReadmeEnvironment
from tests.compat.tiny_models import tiny_model

README_ENV_ID = "ludus-tests/Summarization-v0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return tiny_model(folder, [article.text for article in ARTICLES])


@pytest.fixture(scope="module", autouse=True)
def readme_environment(model: str) -> Iterator[None]:
    """Register the README's environment by the path of its class, as the README does."""
    path = "tests.compat.readme_environment:SummarizationEnv"
    gymnasium.register(README_ENV_ID, path, kwargs={"model_name": model})
    yield
    del gymnasium.registry[README_ENV_ID]


def make_request(model: str, folder: Path, **changes: Any) -> AgentRequest:
    arguments: dict[str, Any] = {
        "env_name": README_ENV_ID,
        "actor": LMActorNetwork(model, pad_token_id=0),
        "critic": LMCriticNetwork(model, pad_token_id=0),
        "ppo_config": PPOConfig(),
        "max_episodes": 1000,
        "max_timesteps": 1000,
        "update_interval": 100,
        "save_interval": 100,
        "save_path": folder,
        "callback": None,
        "log_interval": 10,
        "device": "cpu",
        "num_envs": 8,
        "seed": 0,
    }
    return AgentRequest(**{**arguments, **changes})


def make_long_episode() -> Transcript:
    """Return an episode of three pieces; the environment inserts a text before the last piece."""
    pieces = (("Article: ", "One "), ("", "two "), ("(hint) ", "three."))
    turns = tuple(
        TranscriptTurn(
            shown=(TranscriptMessage(role="user", text=shown_text),), answer=answer, reward=0.5
        )
        for shown_text, answer in pieces
    )
    return Transcript(
        step=1,
        environment="summaries",
        group=0,
        episode=0,
        seed=0,
        policy_version=0,
        status="terminated",
        reward=1.5,
        episode_return=1.5,
        terms={},
        turns=turns,
    )


def make_test_run(request: AgentRequest, model: str) -> LanguageModelRun:
    task = TokenTask.inspect(request.env_name, model, request.max_timesteps, request.seed)
    return make_run(request, task, Path(model), request.actor.model)


@pytest.mark.slow
def test_update_interval_sets_the_groups_per_step(model: str, tmp_path: Path) -> None:
    run = make_test_run(
        make_request(model, tmp_path, max_episodes=1000, update_interval=100), model
    )
    assert run.training.num_steps == 10
    assert run.rollout.group_size * run.training.groups_per_step == 100
    assert run.training.max_staleness == 0
    small_run = make_test_run(make_request(model, tmp_path, max_episodes=3), model)
    assert small_run.training.num_steps == 1, (
        "wrong number of steps for fewer episodes than one update"
    )
    assert small_run.rollout.group_size * small_run.training.groups_per_step == 3


@pytest.mark.slow
def test_num_envs_changes_only_the_final_evaluation(model: str, tmp_path: Path) -> None:
    small_run, large_run = (
        make_test_run(make_request(model, tmp_path, num_envs=num_envs), model)
        for num_envs in (1, 512)
    )
    assert (small_run.eval.num_games, large_run.eval.num_games) == (100, 512)
    assert large_run.model_copy(update={"eval": small_run.eval}) == small_run


def test_callback_receives_the_whole_completion_of_a_long_episode(
    model: str, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []
    request = make_request(
        model, tmp_path, log_interval=1, callback=lambda *arguments: calls.append(arguments)
    )
    record_returns(request, EpisodeReturns(), [make_long_episode()])
    (call,) = calls
    assert call[:6] == ("Article: ", "One two (hint) three.", 0.5, True, False, 1)
    assert call[6] == pytest.approx(0.075)


@pytest.mark.slow
def test_ppo_config_is_mapped_to_run_settings(model: str, tmp_path: Path) -> None:
    config = PPOConfig(lr_actor=1e-4, gamma=0.9, eps_clip=0.1, minibatch_size=25, gae_lambda=0.8)
    run = make_test_run(make_request(model, tmp_path, ppo_config=config), model)
    assert isinstance(run.algorithm, PpoConfig)
    assert (run.algorithm.gamma, run.algorithm.lam) == (0.9, 0.8)
    assert run.algorithm.loss.clip_low == run.algorithm.loss.clip_high == 0.1
    assert (run.learner.learning_rate, run.learner.num_minibatches) == (1e-4, 2)
    assert (run.algorithm.critic.learning_rate, run.learner.update_epochs) == (1e-3, 10)
    assert run.algorithm.kl_coef == 0, "KL coefficient set although the environment has none"


@pytest.mark.slow
def test_a_missing_device_is_refused(model: str, tmp_path: Path) -> None:
    for device in ("abacus", "cuda") if not torch.cuda.is_available() else ("abacus",):
        with pytest.raises(ConfigError, match=f"device must be None.* got '{device}'"):
            make_test_run(make_request(model, tmp_path, device=device), model)


@pytest.mark.slow
def test_the_environment_and_the_model_limit_completions(model: str, tmp_path: Path) -> None:
    assert make_test_run(make_request(model, tmp_path), model).rollout.max_completion_tokens == 64
    short_request = make_request(model, tmp_path, max_timesteps=7)
    run = make_test_run(short_request, model)
    assert run.rollout.max_completion_tokens == 7
    assert isinstance(run.environment, LocalEnvironment)
    assert run.environment.options["max_episode_steps"] == 7
    limited_request = make_request(model, tmp_path, env_name="SummarizationEnv-v0")
    assert make_test_run(limited_request, model).rollout.max_completion_tokens == 64


@pytest.mark.slow
def test_kl_coef_comes_from_the_environment(model: str, tmp_path: Path) -> None:
    gymnasium.register(
        "ludus-tests/RLHF-v0",
        "ludus.trainer.compat.gymformer.env.rlhf_env:RLHFEnv",
        kwargs={"reward_model": "nowhere", "dataset": ["fish?"], "kl_coef": 0.3},
    )
    run = make_test_run(make_request(model, tmp_path, env_name="ludus-tests/RLHF-v0"), model)
    assert (run.algorithm.kl_coef, run.algorithm.kl_placement) == (0.3, "reward")


def test_environment_receives_the_model_of_the_actor(model: str) -> None:
    task = TokenTask.inspect("CoTEnv-v0", model, 400, 0)
    assert task.options["model_name"] == model
    assert task.max_generation == 128


def test_environment_can_be_created_from_options_in_another_process(model: str) -> None:
    task = TokenTask.inspect(README_ENV_ID, model, 20, 0)
    target = "ludus.env.adapters.gymnasium.token_level:TokenLevelEnvironment"
    environment = environment_factory(target, task.options)()
    transition = environment.reset(seed=0)
    assert len(transition.observation.token_ids) <= task.max_prompt_tokens
    assert task.options["import_from"] == str(Path(__file__).parents[2])


def test_unknown_id_error_suggests_a_similar_id(model: str) -> None:
    with pytest.raises(NotFoundError, match="CoTEnv-v0"):
        TokenTask.inspect("CotEnv-v0", model, 100, 0)


def test_an_environment_without_tokens_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="token-level environment"):
        TokenTask.inspect("CartPole-v1", model, 100, 0)


def test_local_class_is_refused(model: str) -> None:
    class LocalClass(ReadmeEnvironment): ...

    gymnasium.register("ludus-tests/Local-v0", LocalClass, kwargs={"model_name": model})
    with pytest.raises(ConfigError, match="move the class to a module"):
        TokenTask.inspect("ludus-tests/Local-v0", model, 100, 0)


def test_non_json_arguments_are_refused(model: str) -> None:
    kwargs = {"reward_model": lambda prompts, completions: [0.0], "dataset": ["fish?"]}
    gymnasium.register(
        "ludus-tests/NonJson-v0",
        "ludus.trainer.compat.gymformer.env.rlhf_env:RLHFEnv",
        kwargs=kwargs,
    )
    with pytest.raises(ConfigError, match="as JSON"):
        TokenTask.inspect("ludus-tests/NonJson-v0", model, 100, 0)


def test_critic_without_token_input_is_refused(model: str, tmp_path: Path) -> None:
    request = make_request(model, tmp_path, critic=MLPCriticNetwork(4, 8))
    with pytest.raises(ConfigError, match="must be an LMCriticNetwork, got MLPCriticNetwork"):
        request.actor.train_as_agent(request)


@pytest.mark.long
@pytest.mark.slow
async def test_training_inside_an_event_loop_changes_the_models_in_place(
    model: str, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []
    request = make_request(
        model,
        tmp_path,
        max_episodes=24,
        max_timesteps=100,
        update_interval=8,
        callback=lambda *arguments: calls.append(arguments),
    )
    models = torch.nn.ModuleList([request.actor.model, request.critic.model])
    initial_weights = {name: weight.clone() for name, weight in models.named_parameters()}
    returns = request.actor.train_as_agent(request)
    assert len(returns) == 24
    assert all(0 <= value <= 1.6 for value in returns) and len(set(returns)) > 1
    has_changed = [
        not torch.equal(initial_weights[name], weight) for name, weight in models.named_parameters()
    ]
    assert all(has_changed)
    state, completion, _, done, truncated, episode, running_return = calls[0]
    assert state.startswith("Article: ") and completion
    assert done != truncated and episode == 10
    assert running_return == pytest.approx(returns.running[9])
    [folder] = [path for path in tmp_path.iterdir() if (path / "metrics.jsonl").is_file()]
    assert make_test_run(request, model).folder == folder
    assert (folder / "summary.json").is_file()
