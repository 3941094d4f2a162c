"""What an update is said to have done: values for metrics.jsonl, and episodes for people."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ludus.env.evaluation import OutcomeKind, classify_outcome
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import Said, Transcript, TranscriptTurn
from ludus.trainer.classic.agent import Trained
from ludus.trainer.classic.collector import Batch
from ludus.trainer.classic.playing import EndedEpisode

_MAX_TURNS = 8
_DIGITS = 4


def values_of(
    trained: Trained, environment: str, duration_s: float, learning_rate: float
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the values of a training step: of the whole run, and by environment."""
    environment_values = _episode_values(trained.batch.episodes)
    metrics = trained.metrics
    run: dict[str, float] = {
        **environment_values,
        TrainMetric.LOSS: metrics.loss,
        TrainMetric.VALUE_LOSS: metrics.value_loss,
        TrainMetric.ENTROPY: metrics.entropy,
        TrainMetric.POLICY_KL: metrics.policy_kl,
        TrainMetric.CLIP_RATIO: metrics.clip_ratio,
        TrainMetric.GRAD_NORM: metrics.grad_norm,
        TrainMetric.NUM_SKIPPED_UPDATES: metrics.num_skipped,
        TrainMetric.LEARNING_RATE: learning_rate,
        TrainMetric.NUM_ENV_STEPS: trained.batch.num_steps,
        TrainMetric.STEP_S: duration_s,
        TrainMetric.TRAIN_S: duration_s,
    }
    if metrics.explained_variance is not None:
        run[TrainMetric.EXPLAINED_VARIANCE] = metrics.explained_variance
    if duration_s > 0:
        run[TrainMetric.EPISODES_PER_SECOND] = len(trained.batch.episodes) / duration_s
    finite = {name: value for name, value in run.items() if math.isfinite(value)}
    return finite, {environment: environment_values}


def _episode_values(episodes: tuple[EndedEpisode, ...]) -> dict[str, float]:
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
    values[TrainMetric.NUM_TURNS_MEAN] = float(np.mean([one.length for one in episodes]))
    if any(episode.success is not None for episode in episodes):
        stood = [classify_outcome(one.episode_return, one.success) for one in episodes]
        values[TrainMetric.NUM_WINS] = stood.count(OutcomeKind.WON)
        values[TrainMetric.NUM_DRAWS] = stood.count(OutcomeKind.DRAWN)
        values[TrainMetric.NUM_LOSSES] = stood.count(OutcomeKind.LOST)
        values[TrainMetric.WIN_RATE] = stood.count(OutcomeKind.WON) / len(episodes)
    return values


def transcripts_of(
    batch: Batch, environment: str, version: int, limit: int
) -> Iterator[Transcript]:
    """Of the first `limit` episodes that ended: what was seen and done in their first steps here.

    An episode that began before this batch is shown from where the batch begins.
    """
    for episode, end in list(zip(batch.episodes, batch.ended_at, strict=True))[:limit]:
        begin = max(0, end + 1 - episode.length)
        turns = tuple(
            _turn(batch, step, episode.place)
            for step in range(begin, min(end + 1, begin + _MAX_TURNS))
        )
        yield Transcript(
            step=0,
            environment=environment,
            group=episode.place,
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


def _turn(batch: Batch, step: int, place: int) -> TranscriptTurn:
    action = batch.actions[step, place].tolist()
    return TranscriptTurn(
        shown=(Said(role="observation", text=_short(batch.observations[step, place].tolist())),),
        answer=_short(action),
        action=action,
        reward=float(batch.rewards[step, place]),
    )


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return str(value)
