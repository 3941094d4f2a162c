"""Evaluations of models without a run: the rows that the trainer writes, and their result."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ludus.proto.runs import PolicyResult, TranscriptTurn

EVALUATION_ROWS_FILE = "episodes.jsonl"
TRUNCATED = "truncated"
"""Status of an episode that a limit cut off."""
INVALID_ACTION = "invalid_action"
"""Status of an episode that ended with text that is not an action."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluatedEpisode(_Record):
    """One episode of an evaluation, with every completion of a model."""

    policy: str
    """Model or fixed policy that played the episode."""
    seed: int
    """Seed of the evaluation, equal for all policies."""
    task_seed: int
    """Seed with which the environment started, equal for all episodes of a task."""
    status: str = ""
    """Final status: terminated, truncated, invalid_action, lost or failed; empty for a fixed
    policy, whose episodes have only a return."""
    episode_return: float | None
    """Sum of the rewards of all steps; null if the episode is void."""
    success: bool | None = None
    """Success that the environment reported; null if unknown."""
    truncation: str = ""
    """Reason why the episode was truncated; empty if it was not."""
    failure: str = ""
    """Reason why the episode is void; empty if it is valid."""
    num_turns: int
    turns: tuple[TranscriptTurn, ...] = ()
    """Turns with the text that the model saw and its completions; empty for a fixed policy."""


class EvaluationPlan(_Record):
    """The part of an evaluation that is known before its first episode."""

    environment: str
    """Name of the environment."""
    options: dict[str, Any]
    """Options of the environment."""
    is_game: bool = True
    """False if the environment has tasks, which are solved, not games, which are won."""
    num_episodes: int
    """Number of episodes of each policy."""
    models: tuple[str, ...]
    baselines: tuple[str, ...]
    """Names of the environment's fixed policies."""


class EvaluationRow(_Record):
    """One line that the trainer writes: the plan, the current activity, or an episode."""

    plan: EvaluationPlan | None = None
    activity: str | None = None
    """Text that says what the trainer does next."""
    episode: EvaluatedEpisode | None = None


class ModelResult(_Record):
    """Results of one model."""

    result: PolicyResult
    truncations: dict[str, int] = {}
    """Number of truncated episodes by reason."""
    failures: dict[str, int] = {}
    """Number of void episodes by reason."""
    gap_closed: float | None = None
    """Share of the gap between the random policy and the best fixed policy that is closed."""
    gap_closed_ci95: tuple[float, float] | None = None


class ModelDifference(_Record):
    """The paired difference between two models, over the tasks that both played."""

    first: str
    second: str
    num_tasks: int
    """Number of tasks that both models played."""
    return_difference: float
    """Mean return of the first model minus that of the second."""
    return_difference_ci95: tuple[float, float]
    win_rate_difference: float | None = None
    """Win rate of the first model minus that of the second; null if wins are not reported."""
    win_rate_difference_ci95: tuple[float, float] | None = None


class ModelEvaluation(_Record):
    """Results of models and fixed policies on the same seeds, with all episodes."""

    environment: str
    options: dict[str, Any]
    is_game: bool = True
    """False if the environment has tasks, which are solved, not games, which are won. True in
    evaluations of earlier versions."""
    endpoint: str | None = None
    """Address of the endpoint that sampled the completions; null if the models were loaded."""
    generator: str | None = None
    """Engine that sampled the completions; null for an endpoint."""
    temperature: float
    seed: int
    first_seed: int
    """Seed of the first episode; every later episode adds 1."""
    max_completion_tokens: int
    num_episodes_requested: int
    num_episodes: int
    """Number of episodes of each policy: at temperature 0 each task is played once."""
    is_finished: bool
    """False if the evaluation was stopped before its last episode."""
    models: dict[str, ModelResult]
    baselines: dict[str, PolicyResult]
    best_baseline: str | None = None
    """Fixed policy with the highest return, at which gap_closed is 1."""
    differences: tuple[ModelDifference, ...] = ()
    """Differences between each pair of models."""
    episodes: tuple[EvaluatedEpisode, ...]
