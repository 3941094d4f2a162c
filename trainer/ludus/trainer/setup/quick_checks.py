"""The checks of a start that need no torch, so that most mistakes are reported within seconds."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ludus.env.targets.targets import check_environment_options
from ludus.env.transports.address import ServerAddress, parse_address
from ludus.env.types import TaskSet
from ludus.proto.config import (
    AnyRunConfig,
    EnvironmentConfig,
    FunctionLoss,
    GrpoConfig,
    LanguageModelRun,
    LocalEnvironment,
    ModelCritic,
    NetworkRun,
    PpoConfig,
    PretrainedModel,
    RemoteEnvironment,
    RewardModelRun,
    RewardModelTerm,
    RewardTerm,
    SftRun,
)
from ludus.proto.errors import CheckpointError, ConfigError
from ludus.proto.paths import parse_path
from ludus.proto.run_lock import is_in_use
from ludus.proto.runs import CHECKPOINTS_FOLDER, Resume
from ludus.trainer.core.functions import import_callable
from ludus.trainer.core.model_paths import check_model_folder, is_fine_tuned_run
from ludus.trainer.data.rows import check_rows_exist
from ludus.trainer.rollout.agents.programs import check_agent
from ludus.trainer.rollout.rewards.arguments import check_columns, check_keyword_arguments
from ludus.trainer.run.wandb import check_key
from ludus.trainer.setup.environments import load_fixed_policies

CONNECT_TIMEOUT_S = 3.0
"""Time limit in seconds for a server to accept a connection."""
_RETRY_INTERVAL_S = 0.2
CRITIC_HINT = "; omit path to start from a copy of the policy"
REWARD_MODEL_HINT = "; `ludus train-reward` writes such a folder"
"""Ends of the messages about missing models."""


def check_names(run: AnyRunConfig, resume: Resume) -> None:
    """Check the functions, models, folders and checkpoints of a run, and the key of its sink.

    Raises:
        UserError: the run cannot start as configured.
    """
    if isinstance(run, LanguageModelRun):
        check_functions(run)
    if isinstance(run, SftRun | RewardModelRun):
        _check_data(run)
    if isinstance(run, LanguageModelRun | SftRun):
        for field, path, hint in _list_model_paths(run):
            check_model_folder(path, field, hint)
        check_folder(run.folder)
    if not isinstance(run, RewardModelRun) and run.metrics.wandb is not None:
        check_key(run.metrics.wandb)
    checkpoints = run.folder / CHECKPOINTS_FOLDER
    if resume is Resume.ALWAYS and not any(checkpoints.glob("step-*")):
        raise CheckpointError(
            f"there is no checkpoint in '{checkpoints}', so the run cannot be resumed; start it as "
            "a new run, or correct its name or output_dir"
        )


def check_environments(run: AnyRunConfig) -> None:
    """Build each local environment once, and look for a server at each remote address.

    Raises:
        UserError: an environment cannot be made, or no server responds.
    """
    if isinstance(run, LanguageModelRun):
        for name, config in run.environments.items():
            if isinstance(config, LocalEnvironment):
                with closing(
                    check_environment_options(config.package, config.options)
                ) as environment:
                    check_reward_columns(run, name, environment.tasks)
                load_fixed_policies(run, name, config.options)
        asyncio.run(check_remote_addresses(run))
    elif isinstance(run, NetworkRun) and run.environment.kind == "local":
        check_environment_options(run.environment.package, run.environment.options).close()


def check_functions(run: LanguageModelRun) -> None:
    """Check that every function and agent that a configuration names can be found.

    Raises:
        ConfigError: a function cannot be imported, or a reward function takes no keyword arguments.
    """
    for field, path in _list_functions(run):
        import_callable(path, field)
    for environment in run.environments.values():
        for path in list_reward_functions(environment):
            check_keyword_arguments(path, import_callable(path, "environment.rewards"))
        if environment.agent is not None:
            check_agent(environment.agent)


def check_reward_columns(run: LanguageModelRun, name: str, tasks: TaskSet | None) -> None:
    """Check that an environment's tasks have the columns that its reward functions use."""
    config = run.environments[name]
    # Rollout functions and agents may report other columns than the environment.
    if tasks is not None and config.rollout is None and config.agent is None:
        check_columns(list_reward_functions(config), tasks.columns, run.environment_section(name))


def list_reward_functions(config: EnvironmentConfig) -> list[str]:
    """Return the paths of an environment's reward functions."""
    terms = [term for term in config.rewards if isinstance(term, RewardTerm)]
    return [term.function for term in terms if term.function is not None]


async def check_remote_addresses(run: LanguageModelRun) -> None:
    """Check that a server listens at the address of each remote environment.

    This check does not use gRPC, so that it may run before other processes are forked.
    """
    connections = []
    for name, config in run.environments.items():
        if isinstance(config, RemoteEnvironment):
            section = run.environment_section(name)
            try:
                address = parse_address(config.address)
            except ConfigError as error:
                raise ConfigError(f"{section}.address: {error}") from None
            connections.append(_find_failure(f"{section}.address = '{address}'", address))
    failures = "; ".join(filter(None, await asyncio.gather(*connections)))
    if failures:
        raise ConfigError(
            f"{failures}; a server must respond within {CONNECT_TIMEOUT_S:g} s: start it, or "
            "correct the address"
        )


def check_folder(folder: Path) -> None:
    """Check that a run's folder is not in use and can be written."""
    if is_in_use(folder):
        raise ConfigError(f"'{folder}' is in use: another process trains there; use another name")
    existing_path = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing_path.is_dir() and os.access(existing_path, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"the run's folder '{folder}' cannot be written, because '{existing_path}' is not a "
            "writable folder; set output_dir to a writable folder"
        )


async def _find_failure(setting: str, address: ServerAddress) -> str | None:
    """Return why no server accepts connections at an address, or None if a server does."""
    url_parts = urlsplit(f"//{address.authority}")
    if url_parts.hostname is None or (getproxies() and not proxy_bypass(url_parts.hostname)):
        return None  # a proxy may reach servers that this machine cannot reach
    port = url_parts.port or (443 if address.is_grpc or address.uses_tls else 80)
    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            async with asyncio.timeout(max(_RETRY_INTERVAL_S, deadline_s - time.monotonic())):
                _, writer = await asyncio.open_connection(url_parts.hostname, port)
        except OSError as error:
            if time.monotonic() + _RETRY_INTERVAL_S > deadline_s:
                return f"{setting}: {error.strerror or 'no response'}"
            await asyncio.sleep(_RETRY_INTERVAL_S)
        else:
            writer.close()
            return None


def _list_functions(run: LanguageModelRun) -> Iterator[tuple[str, str]]:
    """Yield the field and the path of each function in a configuration."""
    for name, environment in run.environments.items():
        section = run.environment_section(name)
        if environment.rollout_function is not None:
            yield f"{section}.rollout", environment.rollout_function
        for field in ("render", "parse", "policies", "policy_chart"):
            path = getattr(environment, field)
            if path is not None:
                yield f"{section}.{field}", path
        for path in list_reward_functions(environment):
            yield f"{section}.rewards", path
    if isinstance(run.algorithm, GrpoConfig) and run.algorithm.advantages is not None:
        yield "algorithm.advantages", run.algorithm.advantages
    if isinstance(run.algorithm.loss, FunctionLoss):
        yield "algorithm.loss.function", run.algorithm.loss.function


def _list_model_paths(run: LanguageModelRun | SftRun) -> Iterator[tuple[str, str, str]]:
    """Yield the field and the path of each model in a configuration, and a hint for its error."""
    if isinstance(run.model, PretrainedModel) and not is_fine_tuned_run(parse_path(run.model.path)):
        yield "model.path", run.model.path, ""
    if isinstance(run, SftRun):
        return
    critic = run.algorithm.critic if isinstance(run.algorithm, PpoConfig) else None
    if isinstance(critic, ModelCritic) and critic.path is not None:
        yield "algorithm.critic.path", critic.path, CRITIC_HINT
    for name, environment in run.environments.items():
        for term in environment.rewards:
            if isinstance(term, RewardModelTerm):
                field = f"{run.environment_section(name)}.rewards.path"
                yield field, term.path, REWARD_MODEL_HINT


def _check_data(run: SftRun | RewardModelRun) -> None:
    """Check that the files of a data set exist."""
    if isinstance(run, RewardModelRun):
        check_rows_exist(run.data)
        return
    check_rows_exist(parse_path(run.data.path), split=run.data.split, field="data.path")
    if run.validation.path is not None:
        path = parse_path(run.validation.path)
        check_rows_exist(path, split=run.validation.split, field="validation.path")
