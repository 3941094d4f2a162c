"""Evaluation of models without a run, in one process without Ray.

    checks --> environment server --> fixed policies --> model after model
                                           |                   |
                                           +--- a row for each episode ---> rows file

The command line reads the rows while they are written, and computes the result from them. It can
therefore show the result of the episodes so far if the evaluation is stopped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from ludus.env.contract.schema import random_policy
from ludus.env.evaluation import EpisodeOutcome, FixedPolicy, play_policy, read_outcome
from ludus.env.targets.policies import find_policies_function, load_policies
from ludus.proto.config import LanguageModelRun, LocalEnvironment
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.errors import ConfigError, EpisodesFailedError
from ludus.proto.evaluations import (
    EVALUATION_ROWS_FILE,
    TRUNCATED,
    EvaluatedEpisode,
    EvaluationPlan,
    EvaluationRow,
)
from ludus.proto.runs import TranscriptTurn
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.types import Rollout, RolloutStatus
from ludus.trainer.driver.evaluated_models import (
    EvaluatedModel,
    check_generator,
    check_model,
    open_model,
)
from ludus.trainer.driver.evaluation import find_max_games, list_eval_seeds, play_until_valid
from ludus.trainer.driver.invalid_actions import resolve_invalid_action_rewards
from ludus.trainer.rollout.endpoint_policy import Endpoint
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode
from ludus.trainer.rollout.runner import episode_limits, sampling_settings
from ludus.trainer.setup.environments import (
    ConnectedEnvironment,
    connect_environments,
    start_local_servers,
)
from ludus.trainer.setup.first_prompts import fetch_first_opening

_MAX_SESSIONS = 256
"""Maximum number of concurrent sessions of a fixed policy."""


@dataclass(frozen=True, slots=True)
class ModelEvaluationRequest:
    """The models of an evaluation, and the endpoint that samples their completions."""

    models: Sequence[str]
    baselines: Sequence[str]
    """Fixed policies to play; empty for all of the environment."""
    endpoint: str | None
    """Address of an OpenAI-compatible endpoint; None if the models are loaded here."""
    token_env: str
    """Environment variable with the token of the endpoint."""
    folder: Path
    """Folder of the rows file and of the server's log."""
    lowers_completion_tokens: bool = False
    """True to lower rollout.max_completion_tokens for a model with a short context."""


class RowsWriter:
    """A writer of the rows that the command line follows."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: EvaluationRow) -> None:
        """Append a row, which readers see at once."""
        self._file.write(row.model_dump_json(exclude_defaults=True) + "\n")
        self._file.flush()

    def write_episode(self, episode: EvaluatedEpisode) -> None:
        """Append an episode; a later row of the same policy and seed replaces it."""
        self.write(EvaluationRow(episode=episode))


def evaluate_models(run: LanguageModelRun, request: ModelEvaluationRequest) -> None:
    """Play the episodes of all models and of the environment's fixed policies.

    Raises:
        UserError: a model, the environment or the endpoint cannot be used.
        EpisodesFailedError: all episodes of a model are void.
    """
    check_generator(run)
    if request.endpoint is None:
        lowers = request.lowers_completion_tokens
        models = [check_model(run, name, lowers=lowers) for name in request.models]
    else:
        if run.rollout.constrain != "none":
            raise ConfigError(
                f"--endpoint samples texts that rollout.constrain = '{run.rollout.constrain}' "
                "cannot restrict; remove rollout.constrain, or evaluate the model without "
                "--endpoint"
            )
        models = [EvaluatedModel(name, run) for name in request.models]
    with (request.folder / EVALUATION_ROWS_FILE).open("a", encoding="utf-8") as file:
        asyncio.run(_play_all(run, request, models, RowsWriter(file)))


async def _play_all(
    run: LanguageModelRun,
    request: ModelEvaluationRequest,
    models: Sequence[EvaluatedModel],
    rows: RowsWriter,
) -> None:
    async with _open_endpoint(run, request) as endpoint:
        rows.write(EvaluationRow(activity="starting the environment"))
        with start_local_servers(run, request.folder) as servers:
            async with connect_environments(run, servers) as environments:
                environment = next(iter(environments.values()))
                await _check_text(environment)
                policies = _find_policies(environment, request.baselines)
                models = _resolve_rewards(models, environments)
                seeds = _list_seeds(run, environment)
                rows.write(
                    EvaluationRow(plan=_make_plan(run, environment, models, policies, seeds))
                )
                await _play_policies(run, environment, policies, seeds, rows)
                for model in models:
                    await _play_model(model, environment, endpoint, seeds, rows)


def _resolve_rewards(
    models: Sequence[EvaluatedModel], environments: Mapping[str, ConnectedEnvironment]
) -> list[EvaluatedModel]:
    """Return the models with the reward of an invalid action that training would use."""
    ranges = {name: item.description.return_range for name, item in environments.items()}
    return [
        replace(model, run=resolve_invalid_action_rewards(model.run, ranges)) for model in models
    ]


@asynccontextmanager
async def _open_endpoint(
    run: LanguageModelRun, request: ModelEvaluationRequest
) -> AsyncIterator[Endpoint | None]:
    """Yield a checked client of the endpoint, or None if the models are loaded here."""
    if request.endpoint is None:
        yield None
        return
    token = os.environ.get(request.token_env)
    endpoint = Endpoint(request.endpoint, token, request.token_env, run.rollout.group_timeout_s)
    try:
        await endpoint.check(request.models)
        yield endpoint
    finally:
        await endpoint.close()


async def _check_text(environment: ConnectedEnvironment) -> None:
    """Check that the environment shows text, or tools.

    Raises:
        ConfigError: the environment shows no text.
    """
    description, config = environment.description, environment.config
    has_text = config.tools or config.render is not None or description.has_text_view
    if not has_text and description.tools:
        names = ", ".join(tool.name for tool in description.tools)
        raise ConfigError(
            f"environment '{description.name}' shows no text, but offers the tools {names}; "
            "add --tools"
        )
    await fetch_first_opening(environment)


def _find_policies(
    environment: ConnectedEnvironment, baselines: Sequence[str]
) -> dict[str, FixedPolicy]:
    """Return the environment's fixed policies by name. Every environment has a random policy.

    Raises:
        ConfigError: one of `baselines` does not exist.
    """
    config, description = environment.config, environment.description
    package = config.package if isinstance(config, LocalEnvironment) else description.name
    policies: dict[str, FixedPolicy] = {RANDOM_POLICY: random_policy(description)}
    function_path = config.policies or find_policies_function(package)
    if function_path is not None:
        policies |= load_policies(function_path, description.options)
    unknown_names = [name for name in baselines if name not in policies]
    if unknown_names:
        raise ConfigError(
            f"--baseline must be one of {', '.join(policies)}, got '{unknown_names[0]}'"
        )
    return {name: policies[name] for name in baselines or policies}


def _list_seeds(run: LanguageModelRun, environment: ConnectedEnvironment) -> list[int]:
    """Return the seeds of all policies.

    At temperature 0, each task is played once, because further episodes would be equal.
    """
    num_episodes = run.eval.num_games
    max_games = find_max_games(run.eval, environment.description.tasks, has_agent=False)
    return list_eval_seeds(run.eval, min(num_episodes, max_games or num_episodes))


def _make_plan(
    run: LanguageModelRun,
    environment: ConnectedEnvironment,
    models: Sequence[EvaluatedModel],
    policies: Mapping[str, FixedPolicy],
    seeds: Sequence[int],
) -> EvaluationPlan:
    # The name of a remote environment in the run is made from its address.
    is_local = isinstance(environment.config, LocalEnvironment)
    return EvaluationPlan(
        environment=next(iter(run.environments)) if is_local else environment.description.name,
        options=dict(environment.description.options),
        is_game=environment.description.is_game,
        num_episodes=len(seeds),
        models=tuple(model.name for model in models),
        baselines=tuple(policies),
    )


async def _play_policies(
    run: LanguageModelRun,
    environment: ConnectedEnvironment,
    policies: Mapping[str, FixedPolicy],
    seeds: Sequence[int],
    rows: RowsWriter,
) -> None:
    """Play the episodes of the fixed policies; one that cannot play is left out with a warning."""
    description = environment.description
    max_turns = episode_limits(run, next(iter(run.environments))).max_turns
    for name, policy in policies.items():
        rows.write(EvaluationRow(activity=f"playing the fixed policy '{name}'"))

        def write_outcome(outcome: EpisodeOutcome, policy_name: str = name) -> None:
            rows.write_episode(_make_policy_episode(policy_name, outcome))

        play = partial(
            play_policy,
            environment.client,
            policy,
            tasks=description.tasks,
            max_turns=max_turns,
            num_concurrent=min(_MAX_SESSIONS, description.max_sessions or _MAX_SESSIONS),
            on_episode=write_outcome,
        )
        try:
            await play_until_valid(play, seeds, f"the fixed policy '{name}'", run.eval)
        except EpisodesFailedError as error:
            warn_user(f"the fixed policy '{name}' is left out: {error}")


async def _play_model(
    model: EvaluatedModel,
    environment: ConnectedEnvironment,
    endpoint: Endpoint | None,
    seeds: Sequence[int],
    rows: RowsWriter,
) -> None:
    """Play the episodes of one model."""
    if endpoint is None:
        rows.write(EvaluationRow(activity=f"loading {model.name}"))
    run = model.run
    sampling = sampling_settings(run.rollout, run.eval.temperature)
    async with open_model(model, environment, endpoint) as player:
        rows.write(EvaluationRow(activity=f"playing {model.name}"))

        async def play(seeds: Sequence[int]) -> list[EpisodeOutcome]:
            outcomes: dict[int, EpisodeOutcome] = {}

            def write(seed: int, rollout: Rollout, episode: PlayedEpisode) -> None:
                evaluated_episode = _make_episode(model, seed, rollout, episode)
                outcomes[seed] = read_outcome(evaluated_episode)
                rows.write_episode(evaluated_episode)

            await player.evaluate(seeds, sampling, write)
            return [outcomes[seed] for seed in seeds]

        await play_until_valid(play, seeds, f"'{model.name}'", run.eval)


def _make_policy_episode(name: str, outcome: EpisodeOutcome) -> EvaluatedEpisode:
    return EvaluatedEpisode(
        policy=name,
        seed=outcome.seed,
        task_seed=outcome.task,
        episode_return=outcome.episode_return,
        success=outcome.success,
        failure=outcome.failure,
        num_turns=outcome.num_steps,
    )


def _make_episode(
    model: EvaluatedModel, seed: int, rollout: Rollout, episode: PlayedEpisode
) -> EvaluatedEpisode:
    """Return the record of a model's episode.

    An episode whose prompt does not fit into the context is truncated, even if it is the first
    prompt. Its return is the sum of the rewards so far.
    """
    is_full = rollout.status.is_void and rollout.limit == "tokens"
    turns = _make_whole_turns(episode)
    is_truncated = is_full or rollout.status is RolloutStatus.TRUNCATED
    return EvaluatedEpisode(
        policy=model.name,
        seed=seed,
        task_seed=rollout.seed,
        status=TRUNCATED if is_full else rollout.status.value,
        episode_return=sum(turn.reward for turn in turns) if is_full else rollout.episode_return,
        success=rollout.success,
        truncation=_explain_truncation(model, rollout, len(turns)) if is_truncated else "",
        failure="" if is_full else rollout.failure,
        num_turns=len(turns),
        turns=turns,
    )


def _make_whole_turns(episode: PlayedEpisode) -> tuple[TranscriptTurn, ...]:
    """Return the turns of an episode, whose completions are not cut as in a transcript."""
    completions = iter(
        message["content"]
        for message in episode.completion
        if not isinstance(message, str) and message["role"] == "assistant"
    )
    return tuple(
        turn.model_copy(update={"answer": next(completions, turn.answer)})
        for turn in episode.history
    )


def _explain_truncation(model: EvaluatedModel, rollout: Rollout, num_turns: int) -> str:
    """Return the reason why an episode was truncated."""
    limits = episode_limits(model.run, rollout.environment)
    if rollout.limit == "turns":
        return f"more than rollout.max_turns = {limits.max_turns} turns"
    if rollout.limit != "tokens":
        return "a limit of the environment"
    prompt = "the conversation" if num_turns else "the first prompt"
    if model.num_context_tokens is None:
        return f"{prompt} is longer than the context of the endpoint's model"
    source = "the model's context"
    if limits.max_tokens != model.num_context_tokens:
        source = "rollout.max_tokens"
    return (
        f"{prompt} leaves no room for a completion of {limits.max_completion_tokens} tokens within "
        f"{source} of {limits.max_tokens} tokens"
    )
