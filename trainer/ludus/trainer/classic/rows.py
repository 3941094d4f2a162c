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
    batch = trained_batch.batch
    environment_values = _compute_episode_values(batch.episodes)
    values: dict[str, float] = {
        **environment_values,
        **trained_batch.metrics,
        TrainMetric.LEARNING_RATE: learning_rate,
        TrainMetric.NUM_ENV_STEPS: batch.num_steps,
        TrainMetric.STEP_S: duration_s,
        TrainMetric.TRAIN_S: duration_s,
    }
    if duration_s > 0:
        values[TrainMetric.EPISODES_PER_SECOND] = len(batch.episodes) / duration_s
    finite_values = {name: value for name, value in values.items() if math.isfinite(value)}
    return finite_values, {environment: environment_values}


def _compute_episode_values(episodes: tuple[FinishedEpisode, ...]) -> dict[str, float]:
    returns = np.array([episode.episode_return for episode in episodes])
    values: dict[str, float] = {
        TrainMetric.NUM_EPISODES: len(episodes),
        TrainMetric.NUM_EPISODES_FINISHED: len(episodes),
        TrainMetric.NUM_EPISODES_SCORED: len(episodes),
        TrainMetric.NUM_EPISODES_TRUNCATED: sum(not episode.terminated for episode in episodes),
    }
    if not episodes:
        return values
    values[TrainMetric.REWARD_MEAN] = float(returns.mean())
    values[TrainMetric.REWARD_STD] = float(returns.std())
    values[TrainMetric.NUM_TURNS_MEAN] = float(np.mean([episode.length for episode in episodes]))
    if any(episode.success is not None for episode in episodes):
        outcomes = [
            classify_outcome(episode.episode_return, episode.success) for episode in episodes
        ]
        values[TrainMetric.NUM_WINS] = outcomes.count(OutcomeKind.WON)
        values[TrainMetric.NUM_DRAWS] = outcomes.count(OutcomeKind.DRAWN)
        values[TrainMetric.NUM_LOSSES] = outcomes.count(OutcomeKind.LOST)
        values[TrainMetric.WIN_RATE] = outcomes.count(OutcomeKind.WON) / len(episodes)
    return values


def make_transcripts(
    batch: NetworkBatch, environment: str, version: int, max_transcripts: int
) -> Iterator[Transcript]:
    """Yield transcripts of the first `max_transcripts` finished episodes of a batch.

    A transcript contains the first steps of the episode's part in the batch.
    """
    for episode, last_step in zip(
        batch.episodes[:max_transcripts], batch.finish_steps, strict=False
    ):
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
    observation = _format_numbers(batch.observations[step, environment_index].tolist())
    return TranscriptTurn(
        shown=(TranscriptMessage(role="observation", text=observation),),
        answer=_format_numbers(action),
        action=action,
        reward=float(batch.rewards[step, environment_index]),
    )


def _format_numbers(numbers: object) -> str:
    if isinstance(numbers, float):
        return f"{numbers:.{_NUM_DIGITS}g}"
    if isinstance(numbers, list):
        return f"[{', '.join(map(_format_numbers, numbers))}]"
    return str(numbers)
