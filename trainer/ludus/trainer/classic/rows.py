"""Metrics and transcripts of a network's training step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ludus.env.evaluation import OutcomeKind, classify_outcome
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import Transcript, TranscriptMessage, TranscriptTurn
from ludus.trainer.classic.agent import TrainedBatch
from ludus.trainer.classic.episodes import FinishedEpisode, NetworkBatch

_MAX_TURNS = 8
_NUM_DIGITS = 4


def compute_step_values(
    trained_batch: TrainedBatch, environment: str, duration_s: float, learning_rate: float
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the metrics of a training step, for the run and by environment."""
    environment_values = _compute_episode_values(trained_batch.batch.episodes)
    metric_values: dict[str, float] = {
        **environment_values,
        **trained_batch.metrics,
        TrainMetric.LEARNING_RATE: learning_rate,
        TrainMetric.NUM_ENV_STEPS: trained_batch.batch.num_steps,
        TrainMetric.STEP_S: duration_s,
        TrainMetric.TRAIN_S: duration_s,
    }
    if duration_s > 0:
        metric_values[TrainMetric.EPISODES_PER_SECOND] = (
            len(trained_batch.batch.episodes) / duration_s
        )
    finite_values = {name: value for name, value in metric_values.items() if math.isfinite(value)}
    return finite_values, {environment: environment_values}


def _compute_episode_values(episodes: tuple[FinishedEpisode, ...]) -> dict[str, float]:
    returns = np.array([episode.episode_return for episode in episodes])
    metric_values: dict[str, float] = {
        TrainMetric.NUM_EPISODES: len(episodes),
        TrainMetric.NUM_EPISODES_FINISHED: len(episodes),
        TrainMetric.NUM_EPISODES_SCORED: len(episodes),
        TrainMetric.NUM_EPISODES_TRUNCATED: sum(not episode.terminated for episode in episodes),
    }
    if not episodes:
        return metric_values
    metric_values[TrainMetric.REWARD_MEAN] = float(returns.mean())
    metric_values[TrainMetric.REWARD_STD] = float(returns.std())
    metric_values[TrainMetric.NUM_TURNS_MEAN] = float(
        np.mean([episode.length for episode in episodes])
    )
    if any(episode.success is not None for episode in episodes):
        outcomes = [
            classify_outcome(episode.episode_return, episode.success) for episode in episodes
        ]
        metric_values[TrainMetric.NUM_WINS] = outcomes.count(OutcomeKind.WON)
        metric_values[TrainMetric.NUM_DRAWS] = outcomes.count(OutcomeKind.DRAWN)
        metric_values[TrainMetric.NUM_LOSSES] = outcomes.count(OutcomeKind.LOST)
        metric_values[TrainMetric.WIN_RATE] = outcomes.count(OutcomeKind.WON) / len(episodes)
    return metric_values


def make_transcripts(
    batch: NetworkBatch, environment: str, version: int, max_transcripts: int
) -> Iterator[Transcript]:
    """Yield transcripts of the first `max_transcripts` finished episodes of a batch.

    A transcript contains the first steps of the episode's part in the batch.
    """
    for episode, last_step in list(zip(batch.episodes, batch.finish_steps, strict=True))[
        :max_transcripts
    ]:
        first_step = max(0, last_step + 1 - episode.length)
        turns = tuple(
            _make_turn(batch, step, episode.environment_index)
            for step in range(first_step, min(last_step + 1, first_step + _MAX_TURNS))
        )
        yield Transcript(
            step=0,
            environment=environment,
            group=episode.environment_index,
            episode=episode.number,
            seed=episode.seed,
            policy_version=version,
            status="terminated" if episode.terminated else "truncated",
            reward=episode.episode_return,
            episode_return=episode.episode_return,
            terms={},
            turns=turns,
            num_turns_left_out=episode.length - len(turns),
        )


def _make_turn(batch: NetworkBatch, step: int, environment_index: int) -> TranscriptTurn:
    action = batch.actions[step, environment_index].tolist()
    observation = _format_value(batch.observations[step, environment_index].tolist())
    return TranscriptTurn(
        shown=(TranscriptMessage(role="observation", text=observation),),
        answer=_format_value(action),
        action=action,
        reward=float(batch.rewards[step, environment_index]),
    )


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.{_NUM_DIGITS}g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return str(value)
