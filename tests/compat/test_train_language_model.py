"""train_agent on a language model: what becomes of its arguments, and a run as it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

import ludus.trainer.compat.gymformer.env  # noqa: F401 - registers its environments
from ludus.env.targets.targets import environment_factory
from ludus.proto.config import LanguageModelRun, LocalEnvironment, PpoConfig
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.compat.gymformer.env.summarization_env import ARTICLES
from ludus.trainer.compat.gymformer.rl.common_nn import MLPCriticNetwork
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig
from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork, LMCriticNetwork
from ludus.trainer.compat.gymformer.trainer.language_run import make_run
from ludus.trainer.compat.gymformer.trainer.request import AgentRequest
from ludus.trainer.compat.gymformer.trainer.token_task import TokenTask
from ludus.trainer.run.folder import run_path
from tests.compat.readme_environment import SummarizationEnv as Printed
from tests.compat.tiny_models import tiny_model

PRINTED = "ludus-tests/Summarization-v0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return tiny_model(folder, [article.text for article in ARTICLES])


@pytest.fixture(scope="module", autouse=True)
def printed(model: str) -> Iterator[None]:
    """The document registers its class by the path of its module."""
    path = "tests.compat.readme_environment:SummarizationEnv"
    gymnasium.register(PRINTED, path, kwargs={"model_name": model})
    yield
    del gymnasium.registry[PRINTED]


def asked(model: str, folder: Path, **changes: Any) -> AgentRequest:
    arguments: dict[str, Any] = {
        "env_name": PRINTED,
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


def run_of(request: AgentRequest, model: str) -> LanguageModelRun:
    task = TokenTask.of(request.env_name, model, request.max_timesteps, request.seed)
    return make_run(request, task, Path(model), request.actor.model)


def test_episodes_between_updates_become_groups_of_a_step(model: str, tmp_path: Path) -> None:
    run = run_of(asked(model, tmp_path, max_episodes=1000, update_interval=100), model)
    assert run.training.num_steps == 10
    assert run.rollout.group_size * run.training.groups_per_step == 100
    assert run.training.max_staleness == 0
    few = run_of(asked(model, tmp_path, max_episodes=3), model)
    assert few.training.num_steps == 1, "fewer episodes than an update takes are still an update"
    assert few.rollout.group_size * few.training.groups_per_step == 3


def test_the_settings_of_ppo_are_those_of_the_run(model: str, tmp_path: Path) -> None:
    config = PPOConfig(lr_actor=1e-4, gamma=0.9, eps_clip=0.1, minibatch_size=25, gae_lambda=0.8)
    run = run_of(asked(model, tmp_path, ppo_config=config), model)
    assert isinstance(run.algorithm, PpoConfig)
    assert (run.algorithm.gamma, run.algorithm.lam) == (0.9, 0.8)
    assert run.algorithm.loss.clip_low == run.algorithm.loss.clip_high == 0.1
    assert (run.learner.learning_rate, run.learner.num_minibatches) == (1e-4, 2)
    assert (run.algorithm.critic.learning_rate, run.learner.update_epochs) == (1e-3, 10)
    assert run.algorithm.kl_coef == 0, "no environment asked for it"


def test_a_device_that_is_not_here_is_refused(model: str, tmp_path: Path) -> None:
    for device in ("abacus", "cuda") if not torch.cuda.is_available() else ("abacus",):
        with pytest.raises(ConfigError, match=f"device = '{device}' expected None"):
            run_of(asked(model, tmp_path, device=device), model)


def test_an_answer_is_as_long_as_environment_and_model_allow(model: str, tmp_path: Path) -> None:
    assert run_of(asked(model, tmp_path), model).rollout.max_completion_tokens == 64
    short = asked(model, tmp_path, max_timesteps=7)
    run = run_of(short, model)
    assert run.rollout.max_completion_tokens == 7
    assert isinstance(run.environment, LocalEnvironment)
    assert run.environment.options["max_episode_steps"] == 7
    limited = asked(model, tmp_path, env_name="SummarizationEnv-v0")
    assert run_of(limited, model).rollout.max_completion_tokens == 64


def test_the_price_of_divergence_is_the_environments_own(model: str, tmp_path: Path) -> None:
    gymnasium.register(
        "ludus-tests/RLHF-v0",
        "ludus.trainer.compat.gymformer.env.rlhf_env:RLHFEnv",
        kwargs={"reward_model": "nowhere", "dataset": ["fish?"], "kl_coef": 0.3},
    )
    run = run_of(asked(model, tmp_path, env_name="ludus-tests/RLHF-v0"), model)
    assert (run.algorithm.kl_coef, run.algorithm.kl_placement) == (0.3, "reward")


def test_an_environment_that_asks_for_a_model_gets_the_actors(model: str) -> None:
    task = TokenTask.of("CoTEnv-v0", model, 400, 0)
    assert task.options["model_name"] == model
    assert task.max_generation == 128


def test_another_process_makes_the_environment_of_what_it_is_told(model: str) -> None:
    task = TokenTask.of(PRINTED, model, 20, 0)
    target = "ludus.env.adapters.gymnasium.token_level:TokenLevelEnvironment"
    environment = environment_factory(target, task.options)()
    first = environment.reset(seed=0)
    assert len(first.observation.token_ids) <= task.longest_prompt
    assert task.options["import_from"] == str(Path(__file__).parents[2])


def test_an_id_that_nobody_registered_is_refused_with_one_that_is_close(model: str) -> None:
    with pytest.raises(NotFoundError, match="CoTEnv-v0"):
        TokenTask.of("CotEnv-v0", model, 100, 0)


def test_an_environment_of_numbers_is_none_for_a_language_model(model: str) -> None:
    with pytest.raises(ConfigError, match="token-level environment"):
        TokenTask.of("CartPole-v1", model, 100, 0)


def test_a_class_that_cannot_be_imported_is_refused(model: str) -> None:
    class Within(Printed): ...

    gymnasium.register("ludus-tests/Within-v0", Within, kwargs={"model_name": model})
    with pytest.raises(ConfigError, match="put the class into a module"):
        TokenTask.of("ludus-tests/Within-v0", model, 100, 0)


def test_arguments_that_do_not_travel_are_refused(model: str) -> None:
    kwargs = {"reward_model": lambda prompts, answers: [0.0], "dataset": ["fish?"]}
    gymnasium.register(
        "ludus-tests/Unsendable-v0",
        "ludus.trainer.compat.gymformer.env.rlhf_env:RLHFEnv",
        kwargs=kwargs,
    )
    with pytest.raises(ConfigError, match="as JSON"):
        TokenTask.of("ludus-tests/Unsendable-v0", model, 100, 0)


def test_a_critic_that_reads_no_tokens_is_refused(model: str, tmp_path: Path) -> None:
    request = asked(model, tmp_path, critic=MLPCriticNetwork(4, 8))
    with pytest.raises(ConfigError, match="expected an LMCriticNetwork, got MLPCriticNetwork"):
        request.actor.train_as_agent(request)


@pytest.mark.slow
async def test_the_printed_environment_trains_a_model_in_place_in_a_notebooks_event_loop(
    model: str, tmp_path: Path
) -> None:
    told: list[tuple[Any, ...]] = []
    request = asked(
        model,
        tmp_path,
        max_episodes=24,
        max_timesteps=100,
        update_interval=8,
        callback=lambda *arguments: told.append(arguments),
    )
    trained = torch.nn.ModuleList([request.actor.model, request.critic.model])
    before = {name: one.clone() for name, one in trained.named_parameters()}
    returns = request.actor.train_as_agent(request)
    assert len(returns) == 24
    assert all(0 <= value <= 1.6 for value in returns) and len(set(returns)) > 1
    moved = [not torch.equal(before[name], one) for name, one in trained.named_parameters()]
    assert all(moved)
    state, answer, _, done, truncated, episode, running = told[0]
    assert state.startswith("Article: ") and answer
    assert done != truncated and episode == 10
    assert running == pytest.approx(returns.running[9])
    [folder] = [one for one in tmp_path.iterdir() if (one / "metrics.jsonl").is_file()]
    assert run_path(run_of(request, model)) == folder
    assert (folder / "summary.json").is_file()
