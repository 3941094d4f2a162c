"""Checks of the models that a run loads; no weights are read."""

from __future__ import annotations

from pathlib import Path

from ludus.proto.config import (
    LanguageModelRun,
    ModelCritic,
    PpoConfig,
    PretrainedModel,
    RewardModelTerm,
)
from ludus.proto.errors import NotFoundError
from ludus.trainer.learner.actor_critic import check_same_tokens
from ludus.trainer.models.load import (
    MODEL_CONFIG_FILE,
    check_reward_model,
    is_folder_path,
    load_config,
)


def check_models(run: LanguageModelRun) -> None:
    """Check the policy, the critic and the reward models.

    Raises:
        UserError: a model does not exist, or is of the wrong kind.
    """
    if isinstance(run.model, PretrainedModel):
        check_model_path(run.model.path)
    check_critic(run)
    check_reward_models(run)


def check_model_path(path: str) -> None:
    """Check that there is a language model.

    Raises:
        NotFoundError: there is none.
    """
    location = _find_model(
        path,
        "model.path",
        "expected a folder with config.json, or a Hugging Face id like 'Qwen/Qwen3-1.7B'",
    )
    load_config(location)


def check_reward_models(run: LanguageModelRun) -> None:
    """Check that every reward model exists and has one output.

    Raises:
        NotFoundError: there is no model.
        ConfigError: the model is not a reward model.
    """
    for name, environment in run.environments.items():
        field = f"{run.environment_section(name)}.rewards.path"
        terms = [term for term in environment.rewards if isinstance(term, RewardModelTerm)]
        for path in {term.path for term in terms}:
            remedy = (
                "expected a folder with config.json, as `ludus train-reward` writes it, or a "
                "Hugging Face id"
            )
            check_reward_model(_find_model(path, field, remedy), field)


def check_critic(run: LanguageModelRun) -> None:
    """Check that the critic exists and has the policy's vocabulary.

    The vocabulary of a tiny model is not known before it is made.

    Raises:
        NotFoundError: there is no model.
        ConfigError: the critic has another vocabulary.
    """
    critic = run.algorithm.critic if isinstance(run.algorithm, PpoConfig) else None
    if not isinstance(critic, ModelCritic) or critic.path is None:
        return
    location = _find_model(
        critic.path,
        "algorithm.critic.path",
        "expected a folder with config.json, or a Hugging Face id; omit path to start from a copy "
        "of the policy",
    )
    if isinstance(run.model, PretrainedModel):
        check_same_tokens(location, run.model.path)


def _find_model(path: str, field: str, remedy: str) -> str:
    """Return the expanded path of a folder with a model, or a Hugging Face id unchanged."""
    if not is_folder_path(path):
        return path
    folder = Path(path).expanduser()
    if not (folder / MODEL_CONFIG_FILE).is_file():
        raise NotFoundError(f"{field} = '{path}': there is no model; {remedy}")
    return str(folder)
