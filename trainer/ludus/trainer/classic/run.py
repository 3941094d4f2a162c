"""A run of classic PPO: an agent with a folder, as `ludus train` leaves it of any run.

Agent.train --Trained--> rows --> metrics.jsonl, sinks
                  every now and then --> judge --> rows; checkpoints; in the end summary.json
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ludus.env.evaluation import EpisodeOutcome, summarize
from ludus.proto.config import NetworkRun
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.runs import (
    CHECKPOINTS_FOLDER,
    NETWORK,
    SUMMARY_FILE,
    EnvironmentResult,
    EvalReport,
    Evaluation,
    Phase,
    Resume,
    Summary,
)
from ludus.trainer.classic.agent import Agent, Trained, judge, num_judged, play, threads
from ludus.trainer.classic.collector import OnStep
from ludus.trainer.classic.environments import VectorEnvironment, make_environments
from ludus.trainer.classic.heads import uniform_actions
from ludus.trainer.classic.networks import make_networks
from ludus.trainer.classic.playing import Played
from ludus.trainer.classic.policy import Policy
from ludus.trainer.classic.rows import transcripts_of, values_of
from ludus.trainer.classic.state import NetworkState, read_agent, write_agent
from ludus.trainer.core.streams import Stream, use_torch_stream
from ludus.trainer.core.types import SavedFile
from ludus.trainer.run.checkpoint import find_newest_checkpoint
from ludus.trainer.run.folder import run_path
from ludus.trainer.run.lifecycle import (
    OpenRun,
    RunStopped,
    StopRequest,
    find_start,
    open_run,
    stop_on_signals,
)
from ludus.trainer.run.summary import RunCounts, describe_environment, make_summary

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ByEpisodes:
    """Has a run count episodes, in place of steps of its environments, and keep their returns."""

    per_update: int
    in_all: int
    """Training ends with the update that has so many."""


class OpenNetworkRun:
    """A run whose folder, environments and agent are open."""

    on_step: OnStep | None = None
    """Called with each step that is trained on."""

    def __init__(
        self,
        run: NetworkRun,
        opened: OpenRun[NetworkState],
        stack: ExitStack,
        by_episodes: ByEpisodes | None = None,
    ) -> None:
        self.run, self.folder, self.metrics = run, opened.folder, opened.metrics
        self._by_episodes = by_episodes
        self.state = opened.state
        self.stop_request = StopRequest()
        self.ppo = run.ppo
        self._begun_s = time.monotonic()
        self._checkpoints = opened.checkpoints
        self._name = next(iter(run.environments))
        self.metrics.log_phase(Phase.START_ENVIRONMENT)
        environments = make_environments(run.environment, self.ppo.num_environments)
        stack.callback(environments.close)
        self.metrics.set_environment_options({self._name: environments.options})
        most = max(run.eval.num_games, run.eval.num_games_during)
        self._judged = make_environments(run.environment, num_judged(most))
        stack.callback(self._judged.close)
        self.metrics.log_phase(Phase.PREPARE_MODEL)
        self.policy = make_policy(run, environments)
        self.agent = Agent(
            self.policy,
            environments,
            self.ppo,
            seed=run.seed,
            max_steps=run.environment.max_turns,
            num_episodes=by_episodes.per_update if by_episodes else None,
            on_step=self._stepped,
            keeps_actions=True,
            is_shuffled=run.training.shuffle_rewards,
        )
        self._baselines = self._play_baselines()

    def stop(self) -> None:
        """End training after the step it is in."""
        self.stop_request.set()

    def train(self) -> Summary:
        """What the run came to, once it has trained its last step.

        Raises:
            RunStopped: `stop` was called.
        """
        config, step = self.run.training, self.state.step
        if step == 0 and self.run.eval.num_games_during:
            self.state.start[self._name] = self._evaluate(self.run.eval.num_games_during).policy
        self.metrics.log_phase(Phase.TRAIN, self.state.step)
        self.metrics.clock.start()
        while not self._has_ended:
            self._step()
            step, is_last = self.state.step, self._has_ended
            is_due = step % config.checkpoint_every_steps == 0
            if is_due or is_last or self.stop_request.is_set:
                self._save()
            if self.stop_request.is_set and not is_last:
                self.metrics.clock.stop()
                raise RunStopped(f"stopped after step {step}")
        self.metrics.clock.stop()
        return self._finish()

    @property
    def _has_ended(self) -> bool:
        state, by_episodes = self.state, self._by_episodes
        if state.has_reached_target or state.step >= self.run.training.num_steps:
            return True
        return by_episodes is not None and state.num_episodes >= by_episodes.in_all

    def _stepped(self, seen: np.ndarray, actions: np.ndarray, played: Played) -> None:
        if self.on_step is not None:
            self.on_step(seen, actions, played)

    def _step(self) -> None:
        begun_s = time.monotonic()
        left = 1.0
        if self.ppo.schedule == "linear":
            left = 1 - self.state.step / self.run.training.num_steps
        trained = self.agent.train(max(left, 0.0))
        state = self.state
        state.step += 1
        state.num_episodes += len(trained.batch.episodes)
        if self._by_episodes is not None:
            returns = (episode.episode_return for episode in trained.batch.episodes)
            state.returns = [*state.returns, *returns][: self._by_episodes.in_all]
        state.num_env_steps += trained.batch.num_steps
        self._tell(trained, time.monotonic() - begun_s, self.ppo.learning_rate * left)
        every, num_games = self.run.eval.every_steps, self.run.eval.num_games_during
        if num_games and state.step % every == 0 and state.step < self.run.training.num_steps:
            report = self._evaluate(num_games)
            target = self.ppo.target_return
            if target is not None and report.policy.expected_return >= target:
                state.has_reached_target = self._confirms(target)

    def _tell(self, trained: Trained, duration_s: float, learning_rate: float) -> None:
        values, environments = values_of(trained, self._name, duration_s, learning_rate)
        self.metrics.log_step(self.state.step, self.state.num_episodes, values, environments)
        limit = self.run.metrics.transcripts_per_step
        version = self.state.step - 1
        transcripts = transcripts_of(trained.batch, self._name, version, limit)
        self.metrics.log_transcripts(self.state.step, transcripts)

    def _evaluate(self, num_games: int) -> EvalReport:
        """The policy beside the fixed ones, which is told."""
        self.metrics.clock.stop()
        self.metrics.log_phase(Phase.EVALUATE, self.state.step)
        report = self.report(num_games)
        self.metrics.log_evaluation(self.state.step, self.state.num_episodes, self._name, report)
        self.metrics.log_phase(Phase.TRAIN, self.state.step)
        self.metrics.clock.start()
        return report

    def _confirms(self, target: float) -> bool:
        """Whether as many games as the final evaluation has reach the target, too.

        The few games of an evaluation may all go well by chance, and there are many evaluations.
        The seeds are those after the final evaluation's, which thereby stays unbiased.
        """
        run, num_games = self.run, self.run.eval.num_games
        self.metrics.clock.stop()
        outcomes = self._play(_seeds(run, num_games, first=num_games))
        found = summarize(outcomes).expected_return
        reaches = found >= target
        _log.info(
            "step %d reached ppo.target_return = %g; %d more games %s it: %g",
            *(self.state.step, target, num_games, "confirm" if reaches else "deny", found),
        )
        self.metrics.clock.start()
        return reaches

    def _play(self, seeds: Sequence[int]) -> list[EpisodeOutcome]:
        run = self.run
        return judge(
            self.policy,
            self._judged,
            seeds,
            is_greedy=run.eval.temperature == 0,
            run_seed=run.seed,
            max_steps=run.environment.max_turns,
        )

    def report(self, num_games: int) -> EvalReport:
        """The policy beside the fixed ones, on the same seeds."""
        run = self.run
        return EvalReport(
            policy=summarize(self._play(_seeds(run, num_games))),
            baselines={name: summarize(of[:num_games]) for name, of in self._baselines.items()},
            temperature=run.eval.temperature,
            gap_closed=None,
            gap_closed_ci95=None,
        )

    def _play_baselines(self) -> dict[str, list[EpisodeOutcome]]:
        """The random policy, where it is asked for."""
        if RANDOM_POLICY not in self.run.environment.baselines:
            return {}
        environments, head = self._judged, self.policy.head

        def choose(observations: np.ndarray, step: int) -> np.ndarray:
            with use_torch_stream(self.run.seed, Stream.RANDOM_ACTIONS, step):
                drawn = uniform_actions(environments.action_space, head, environments.num)
            return head.to_environment(drawn.numpy())

        most = max(self.run.eval.num_games, self.run.eval.num_games_during)
        seeds = _seeds(self.run, most)
        return {RANDOM_POLICY: play(environments, seeds, choose, self.run.environment.max_turns)}

    def _save(self) -> None:
        begun_s = time.monotonic()
        with self._checkpoints.prepare(self.state.step) as folder:
            file = write_agent(folder, self.agent.state())
            self._checkpoints.commit_local(folder, self.state, [SavedFile.from_path(file)])
        self.metrics.log_checkpoint(self.state.step, time.monotonic() - begun_s)

    def _finish(self) -> Summary:
        self.metrics.log_phase(Phase.EVALUATE, self.state.step)
        report = self.report(self.run.eval.num_games)
        self.metrics.log_evaluation(self.state.step, self.state.num_episodes, self._name, report)
        summary = _summary(self, report, time.monotonic() - self._begun_s)
        self.folder.write(SUMMARY_FILE, summary)
        self.metrics.log_phase(Phase.DONE, self.state.step)
        return summary

    @property
    def described(self) -> str:
        """Name of the environment and what it was built with."""
        environment = self.run.environment
        place = environment.address if environment.kind == "remote" else environment.package
        return describe_environment(place, self._judged.options)

    @property
    def environment_name(self) -> str:
        """What the run calls its environment."""
        return self._name


def train(run: NetworkRun, *, resume: Resume, overwrite: bool) -> Path:
    """The folder of the run, which has trained its last step.

    Raises:
        UserError: the run cannot start as configured.
        RunStopped: SIGINT or SIGTERM ended it.
    """
    opening = opened(run, resume=resume, overwrite=overwrite)
    with opening as opened_run, stop_on_signals(opened_run.stop_request):
        opened_run.train()
    return opened_run.folder.path


@contextmanager
def opened(
    run: NetworkRun, *, resume: Resume, overwrite: bool, by_episodes: ByEpisodes | None = None
) -> Iterator[OpenNetworkRun]:
    """A run with its folder; one that could not start leaves none behind.

    Raises:
        UserError: the run cannot start as configured.
    """
    with ExitStack() as stack:
        files = stack.enter_context(open_run(run, NetworkState, resume=resume, overwrite=overwrite))
        stack.enter_context(threads(run.ppo.num_threads))
        opened_run = OpenNetworkRun(run, files, stack, by_episodes)
        if files.checkpoint is not None:
            opened_run.agent.restore(read_agent(files.checkpoint))
            files.folder.write_config(run)
        yield opened_run


def evaluate(
    run: NetworkRun, checkpoint: Path | None, *, num_games: int, temperature: float | None
) -> Evaluation:
    """How a checkpoint's policy does beside the fixed policies."""
    chosen = (
        run.eval
        if temperature is None
        else run.eval.model_copy(update={"temperature": temperature})
    )
    run = run.model_copy(update={"eval": chosen.model_copy(update={"num_games": num_games})})
    checkpoint = checkpoint or find_newest_checkpoint(run_path(run) / CHECKPOINTS_FOLDER)
    environments = make_environments(run.environment, num_judged(num_games))
    try:
        policy = make_policy(run, environments)
        policy.load_state_dict(read_agent(checkpoint)["policy"])
        outcomes = judge(
            policy,
            environments,
            _seeds(run, num_games),
            is_greedy=run.eval.temperature == 0,
            run_seed=run.seed,
            max_steps=run.environment.max_turns,
        )
    finally:
        environments.close()
    report = EvalReport(
        policy=summarize(outcomes),
        baselines={},
        temperature=run.eval.temperature,
        gap_closed=None,
        gap_closed_ci95=None,
    )
    return Evaluation(environments={next(iter(run.environments)): report})


def check(run: NetworkRun, resume: Resume) -> None:
    """Build what a start builds, and write nothing.

    Raises:
        UserError: it cannot start as configured.
    """
    environments = make_environments(run.environment, 1)
    try:
        make_policy(run, environments)
    finally:
        environments.close()
    find_start(run, resume, NetworkState)


def make_policy(run: NetworkRun, environments: VectorEnvironment) -> Policy:
    """The policy as it begins.

    Raises:
        ConfigError: it does not fit the environment.
    """
    model = run.model
    seen, acts = environments.observation_space, environments.action_space
    with use_torch_stream(run.seed, Stream.NETWORK_WEIGHTS):
        actor, critic = make_networks(model, seen, acts)
        return Policy(
            actor,
            critic,
            seen,
            acts,
            normalises=model.normalise_observations,
            device=model.device,
        )


def _seeds(run: NetworkRun, num_games: int, *, first: int = 0) -> Sequence[int]:
    begin = run.eval.seed + first
    return range(begin, begin + num_games)


def _summary(opened_run: OpenNetworkRun, report: EvalReport, total_s: float) -> Summary:
    state, name = opened_run.state, opened_run.environment_name
    result = EnvironmentResult(
        environment=opened_run.described, start=state.start.get(name), report=report
    )
    return make_summary(
        opened_run.run,
        {name: result},
        RunCounts(games_trained=state.num_episodes, games_played=state.num_episodes),
        num_steps=state.step,
        generator=NETWORK,
        training_s=opened_run.metrics.clock.elapsed_s,
        total_s=total_s,
    )
