"""A run that trains a network and writes a run folder.

PpoAgent.train --TrainedBatch--> metrics and transcripts --> run folder
       |
       +--> evaluations, checkpoints; at the end summary.json
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from ludus.env.evaluation import EpisodeOutcome, summarize
from ludus.proto.config import NetworkRun
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.errors import CheckpointError
from ludus.proto.runs import (
    CONFIG_FILE,
    NETWORK,
    STEP_TIME_PREFIX,
    EvalReport,
    Evaluation,
    Phase,
    Resume,
    Summary,
)
from ludus.trainer.classic.agent import (
    PpoAgent,
    choose_num_eval_environments,
    evaluate_policy,
    play_episodes,
)
from ludus.trainer.classic.environments import VectorEnvironment, make_environments
from ludus.trainer.classic.heads import sample_uniform_actions
from ludus.trainer.classic.policy import NetworkPolicy, make_networks
from ludus.trainer.classic.rows import compute_step_values, make_transcripts
from ludus.trainer.classic.step_time import measure_step
from ludus.trainer.core.devices import use_torch_threads
from ludus.trainer.core.option_names import name_option
from ludus.trainer.core.stopping import (
    RunStopped,
    StepAbandoned,
    StopRequest,
    stop_on_signals,
)
from ludus.trainer.core.streams import Stream, use_torch_stream
from ludus.trainer.run.checkpoint import SavedState, restore_learner_state
from ludus.trainer.run.lifecycle import RunStorage, find_start, open_run
from ludus.trainer.run.metrics_writer import MetricsWriter
from ludus.trainer.run.schedule import CheckpointSchedule
from ludus.trainer.run.summary import write_summary

_log = logging.getLogger(__name__)


class NetworkState(SavedState):
    """State of a network run between two training steps."""

    num_episodes: int = 0
    """Number of finished episodes."""
    num_env_steps: int = 0
    returns: list[float] = Field(default_factory=list)
    """Return of each episode, if the run has an episode budget."""
    has_reached_target: bool = False
    """True after an evaluation reached ppo.target_return, which stops training."""


@dataclass(frozen=True, slots=True)
class EpisodeBudget:
    """Length of a run in episodes instead of training steps; such a run records each return."""

    episodes_per_update: int
    num_episodes: int


@dataclass(slots=True)
class _RestorePoint:
    """The state after the last complete step."""

    state: NetworkState
    agent_state: dict[str, Any]


class OpenNetworkRun:
    """A network run with its open folder, environments and agent."""

    def __init__(
        self,
        run: NetworkRun,
        storage: RunStorage[NetworkState],
        exit_stack: ExitStack,
        budget: EpisodeBudget | None = None,
    ) -> None:
        self.run, self.state, self._storage = run, storage.state, storage
        self.stop_request = StopRequest(run.training.stop_grace_s)
        self._budget = budget
        self._start_s = time.monotonic()
        self._environment_name = next(iter(run.environments))
        resume_from = None if storage.checkpoint is None else storage.state.step
        self.metrics = MetricsWriter(run, storage.folder.path, resume_from=resume_from)
        exit_stack.enter_context(closing(self.metrics))
        self.metrics.log_phase(Phase.START_ENVIRONMENT)
        environments = make_environments(run.environment, run.ppo.num_environments)
        exit_stack.enter_context(closing(environments))
        self.metrics.set_environments(
            {self._environment_name: environments.options},
            {self._environment_name} if environments.is_game else set(),
        )
        max_games = max(run.eval.num_games, run.eval.num_games_during)
        self._eval_environments = make_environments(
            run.environment, choose_num_eval_environments(max_games)
        )
        exit_stack.enter_context(closing(self._eval_environments))
        self.metrics.log_phase(Phase.PREPARE_MODEL)
        self.policy = make_policy(run, environments)
        self.agent = PpoAgent(
            self.policy,
            environments,
            run.ppo,
            seed=run.seed,
            max_steps=run.environment.max_turns,
            num_episodes=budget.episodes_per_update if budget else None,
            shuffles_rewards=run.training.shuffle_rewards,
        )
        self._baselines = self._play_baselines()
        if storage.checkpoint is not None:
            restore_learner_state(storage.checkpoint, self.agent.restore)
            storage.folder.write(CONFIG_FILE, run)
        self._saved_step = self.state.step
        self._checkpoint_schedule = CheckpointSchedule(
            run.training.checkpoint_every_steps, run.training.checkpoint_every_s
        )
        self._restore_point: _RestorePoint | None = None

    def train(self) -> Summary:
        """Train to the last step, and return the summary.

        Raises:
            RunStopped: `stop_request` was set.
            Exception: a step failed. A note says from which checkpoint the run can continue.
        """
        if self.state.step == 0 and not self.state.start_results:
            self.state.is_evaluation_due = True
        self.metrics.log_phase(Phase.TRAIN, self.state.step)
        self.metrics.clock.start()
        try:
            self._train_steps()
        except StepAbandoned:
            self._save_checkpoint()
            step = self._saved_step
            raise RunStopped(
                f"stopped after step {step}; the work after it was abandoned, and is done again"
            ) from None
        except Exception as error:
            self._save_after_failure(error)
            raise
        finally:
            self.metrics.clock.stop()
        if not self._is_finished:
            raise RunStopped(f"stopped after step {self.state.step}")
        # Training is over, so that the next signal interrupts the evaluation at once.
        self.stop_request.hurry()
        return self._finish()

    def _train_steps(self) -> None:
        """Train until the last step, or until a stop is requested; write checkpoints."""
        request = self.stop_request
        self._evaluate_if_due()
        while not (self._is_finished or request.is_set):
            self._train_step()
            self._checkpoint_schedule.end_step()
            agent_state = copy.deepcopy(self.agent.get_state())
            self._restore_point = _RestorePoint(self.state.model_copy(), agent_state)
            self._evaluate_if_due()
            self._restore_point.state = self.state.model_copy()
            if self._is_checkpoint_due:
                self._save_checkpoint()
        self._save_checkpoint()

    def _save_after_failure(self, error: Exception) -> None:
        """Save the last complete step, and add a note to the error on how to continue the run."""
        try:
            self._save_checkpoint()
        except CheckpointError as failure:
            _log.warning("no checkpoint can be written: %s", failure)
        if self._storage.checkpoints.list_newest_first():
            error.add_note(f"continue with {name_option('resume')} from step {self._saved_step}")

    def _save_checkpoint(self) -> None:
        """Write the checkpoint of the last complete step, unless it is written already."""
        point = self._restore_point
        if point is None or point.state.step == self._saved_step:
            return
        start_s = time.monotonic()
        self._storage.checkpoints.save(point.state, point.agent_state, self.metrics.evaluations)
        self._saved_step = point.state.step
        duration_s = time.monotonic() - start_s
        self._checkpoint_schedule.end_checkpoint(duration_s)
        self.metrics.log_checkpoint(self._saved_step, duration_s)

    @property
    def _is_checkpoint_due(self) -> bool:
        """True if a checkpoint must follow this step; also if its policy is the best so far."""
        step = self.state.step
        return self._checkpoint_schedule.is_due(step) or self._storage.checkpoints.is_best(
            step, self.metrics.evaluations
        )

    @property
    def _is_finished(self) -> bool:
        state, budget = self.state, self._budget
        if state.has_reached_target or state.step >= self.run.training.num_steps:
            return True
        return budget is not None and state.num_episodes >= budget.num_episodes

    def _train_step(self) -> None:
        run, state = self.run, self.state
        start_s = time.monotonic()
        learning_rate_factor = 1.0
        if run.ppo.schedule == "linear":
            learning_rate_factor = max(1 - state.step / run.training.num_steps, 0.0)
        with self.stop_request.interrupts_step():
            trained_batch = self.agent.train(learning_rate_factor)
        name = self._environment_name
        batch = trained_batch.batch
        state.step += 1
        state.num_episodes += len(batch.episodes)
        state.num_env_steps += batch.num_steps
        if self._budget is not None:
            returns = [episode.episode_return for episode in batch.episodes]
            state.returns = [*state.returns, *returns][: self._budget.num_episodes]
        duration_s = time.monotonic() - start_s
        learning_rate = run.ppo.learning_rate * learning_rate_factor
        values = compute_step_values(trained_batch, name, duration_s, learning_rate)
        self.metrics.log_step(state.step, state.num_episodes, *values)
        max_transcripts = run.metrics.transcripts_per_step
        transcripts = make_transcripts(batch, name, state.step - 1, max_transcripts)
        self.metrics.log_transcripts(state.step, transcripts)
        is_last = state.step >= run.training.num_steps
        state.is_evaluation_due = state.step % run.eval.every_steps == 0 and not is_last

    def _evaluate_if_due(self) -> None:
        """Evaluate the policy; a resumed run makes up for an evaluation that a stop prevented."""
        run, state = self.run, self.state
        num_games, target = run.eval.num_games_during, run.ppo.target_return
        if not num_games:
            state.is_evaluation_due = False
        if not state.is_evaluation_due or self.stop_request.is_set:
            return
        with self.stop_request.interrupts_step():
            policy_result = self._evaluate(num_games).policy
            if state.step == 0:
                state.start_results[self._environment_name] = policy_result
            elif target is not None and policy_result.expected_return >= target:
                state.has_reached_target = self._confirm_target(target)
            state.is_evaluation_due = False

    def _evaluate(self, num_games: int) -> EvalReport:
        """Evaluate the policy and record the report."""
        metrics, state = self.metrics, self.state
        metrics.clock.stop()
        metrics.log_phase(Phase.EVALUATE, state.step)
        report = self.make_report(num_games)
        metrics.log_evaluation(state.step, state.num_episodes, self._environment_name, report)
        metrics.log_phase(Phase.TRAIN, state.step)
        metrics.clock.start()
        return report

    def _confirm_target(self, target: float) -> bool:
        """Return whether the mean return of other episodes also reaches the target.

        A small evaluation may reach the target by chance, and a run has many evaluations. The
        seeds follow the seeds of the final evaluation, so the final evaluation shares seeds only
        with the evaluations during training.
        """
        run, num_games = self.run, self.run.eval.num_games
        self.metrics.clock.stop()
        outcomes = self.play_eval_episodes(_list_eval_seeds(run, num_games, offset=num_games))
        mean_return = summarize(outcomes).expected_return
        is_confirmed = mean_return >= target
        _log.info(
            "step %d reached ppo.target_return = %g; the mean return of %d further episodes is "
            "%g: %s",
            *(self.state.step, target, num_games, mean_return),
            "confirmed" if is_confirmed else "not confirmed",
        )
        self.metrics.clock.start()
        return is_confirmed

    def play_eval_episodes(self, seeds: Sequence[int]) -> list[EpisodeOutcome]:
        """Play one episode per seed with the current policy, as in an evaluation."""
        return _play_policy(self.run, self.policy, self._eval_environments, seeds)

    def make_report(self, num_games: int) -> EvalReport:
        """Evaluate the policy; return a report with the baselines' results on the same seeds."""
        outcomes = self.play_eval_episodes(_list_eval_seeds(self.run, num_games))
        baselines = {name: baseline[:num_games] for name, baseline in self._baselines.items()}
        return _make_report(self.run, self._eval_environments, outcomes, baselines)

    def _play_baselines(self) -> dict[str, list[EpisodeOutcome]]:
        run = self.run
        if RANDOM_POLICY not in run.environment.baselines:
            return {}
        environments, head = self._eval_environments, self.policy.head

        def choose_actions(observations: np.ndarray, step: int) -> np.ndarray:
            with use_torch_stream(run.seed, Stream.RANDOM_ACTIONS, step):
                actions = sample_uniform_actions(
                    environments.action_space, head, environments.num_environments
                )
            return head.to_environment_actions(actions.numpy())

        seeds = _list_eval_seeds(run, max(run.eval.num_games, run.eval.num_games_during))
        outcomes = play_episodes(environments, seeds, choose_actions, run.environment.max_turns)
        return {RANDOM_POLICY: outcomes}

    def _finish(self) -> Summary:
        """Evaluate the trained policy, and write and return the summary."""
        run, state, metrics = self.run, self.state, self.metrics
        metrics.log_phase(Phase.EVALUATE, state.step)
        report = self.make_report(run.eval.num_games)
        environment = run.environment
        target = environment.address if environment.kind == "remote" else environment.package
        summary = write_summary(
            run,
            self._storage,
            metrics,
            {self._environment_name: (target, self._eval_environments.options)},
            {self._environment_name: report},
            {"games_trained": state.num_episodes, "games_played": state.num_episodes},
            generator=NETWORK,
            total_s=time.monotonic() - self._start_s,
        )
        metrics.log_phase(Phase.DONE, state.step)
        return summary


def train(run: NetworkRun, *, resume: Resume, overwrite: bool) -> Path:
    """Train a run to its last step, and return its folder.

    Raises:
        UserError: the run cannot start as configured.
        RunStopped: SIGINT or SIGTERM stopped the run.
    """
    with (
        open_network_run(run, resume=resume, overwrite=overwrite) as network_run,
        stop_on_signals(network_run.stop_request),
    ):
        network_run.train()
    return run.folder


@contextmanager
def open_network_run(
    run: NetworkRun, *, resume: Resume, overwrite: bool, budget: EpisodeBudget | None = None
) -> Iterator[OpenNetworkRun]:
    """Open a run and its folder, and yield the run. A run that cannot start leaves no folder."""
    num_kept = run.training.keep_checkpoints
    with (
        open_run(run, NetworkState, num_kept, resume=resume, overwrite=overwrite) as storage,
        use_torch_threads(run.ppo.num_threads),
        ExitStack() as stack,
    ):
        yield OpenNetworkRun(run, storage, stack, budget)


def check(run: NetworkRun, *, resume: Resume, overwrite: bool) -> None:
    """Check that a run can start, without writing anything.

    Standard output gets the seconds of a training step, if the environment is local and a step is
    short.
    """
    with closing(make_environments(run.environment, 1)) as environments:
        policy = make_policy(run, environments)
    find_start(run, resume, NetworkState)
    step_s = measure_step(run, policy) if run.environment.kind == "local" else None
    if step_s is not None:
        sys.stdout.write(f"{STEP_TIME_PREFIX}{step_s}\n")


def evaluate(run: NetworkRun, checkpoint: Path) -> Evaluation:
    """Evaluate the policy of a checkpoint and return the report."""
    num_games = run.eval.num_games
    num_environments = choose_num_eval_environments(num_games)
    with closing(make_environments(run.environment, num_environments)) as environments:
        policy = make_policy(run, environments)
        restore_learner_state(checkpoint, lambda state: policy.load_state_dict(state["policy"]))
        outcomes = _play_policy(run, policy, environments, _list_eval_seeds(run, num_games))
        report = _make_report(run, environments, outcomes, {})
    return Evaluation(environments={next(iter(run.environments)): report})


def make_policy(run: NetworkRun, environments: VectorEnvironment) -> NetworkPolicy:
    """Return the initial policy."""
    model = run.model
    observations, actions = environments.observation_space, environments.action_space
    with use_torch_stream(run.seed, Stream.NETWORK_WEIGHTS):
        actor, critic = make_networks(model, observations, actions)
        return NetworkPolicy(
            actor,
            critic,
            observations,
            actions,
            normalizes_observations=model.normalise_observations,
            device=model.device,
        )


def _play_policy(
    run: NetworkRun, policy: NetworkPolicy, environments: VectorEnvironment, seeds: Sequence[int]
) -> list[EpisodeOutcome]:
    return evaluate_policy(
        policy,
        environments,
        seeds,
        is_greedy=run.eval.temperature == 0,
        run_seed=run.seed,
        max_steps=run.environment.max_turns,
    )


def _make_report(
    run: NetworkRun,
    environments: VectorEnvironment,
    outcomes: Sequence[EpisodeOutcome],
    baselines: Mapping[str, Sequence[EpisodeOutcome]],
) -> EvalReport:
    return EvalReport(
        policy=summarize(outcomes),
        baselines={name: summarize(baseline) for name, baseline in baselines.items()},
        temperature=run.eval.temperature,
        gap_closed=None,
        gap_closed_ci95=None,
        is_game=environments.is_game,
    )


def _list_eval_seeds(run: NetworkRun, num_games: int, *, offset: int = 0) -> Sequence[int]:
    first_seed = run.eval.seed + offset
    return range(first_seed, first_seed + num_games)
