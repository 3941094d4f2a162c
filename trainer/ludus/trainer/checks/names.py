"""Checks of the functions that a configuration names."""

from __future__ import annotations

from ludus.env.types import TaskSet
from ludus.proto.config import (
    EnvironmentConfig,
    FunctionLoss,
    GrpoConfig,
    LanguageModelRun,
    RewardTerm,
)
from ludus.trainer.algorithms.losses import LOSS_FUNCTION_FIELD
from ludus.trainer.core.functions import import_object
from ludus.trainer.rollout.agents.launchers import check_agent
from ludus.trainer.rollout.rewards.reward_function import check_columns
from ludus.trainer.setup.environments import load_chart_prompts


def check_names(run: LanguageModelRun) -> None:
    """Check that every named function can be imported, and that the chart's prompts can be made.

    Many of them are first used after hours of training.

    Raises:
        ConfigError: a function cannot be imported, or the prompts cannot be made.
    """
    for environment in run.environments.values():
        if environment.rollout_function is not None:
            import_object(environment.rollout_function, "environment.rollout")
        for field in ("render", "parse", "policies", "policy_chart"):
            path = getattr(environment, field)
            if path is not None:
                import_object(path, f"environment.{field}")
        for path in list_reward_functions(environment):
            import_object(path, "environment.rewards")
        if environment.agent is not None:
            check_agent(environment.agent)
    if isinstance(run.algorithm, GrpoConfig) and run.algorithm.advantages is not None:
        import_object(run.algorithm.advantages, "algorithm.advantages")
    if isinstance(run.algorithm.loss, FunctionLoss):
        import_object(run.algorithm.loss.function, LOSS_FUNCTION_FIELD)
    load_chart_prompts(run)


def check_reward_columns(run: LanguageModelRun, name: str, tasks: TaskSet | None) -> None:
    """Check that an environment's data has the columns that its reward functions use.

    Raises:
        ConfigError: a column is missing.
    """
    config = run.environments[name]
    # Rollout functions and agents may report other columns than the environment.
    if tasks is not None and config.rollout is None and config.agent is None:
        check_columns(list_reward_functions(config), tasks.columns, run.environment_section(name))


def list_reward_functions(config: EnvironmentConfig) -> list[str]:
    """Return the paths of an environment's reward functions."""
    terms = [term for term in config.rewards if isinstance(term, RewardTerm)]
    return [term.function for term in terms if term.function is not None]
