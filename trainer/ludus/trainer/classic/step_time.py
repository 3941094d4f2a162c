"""The measurement of a training step before a run starts.

a short step, without the first one --> estimate of a whole step --short enough--> a whole step
                                                        |
                                                        +------too long----------> None
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass

from ludus.proto.config import NetworkPpoConfig, NetworkRun
from ludus.proto.runs import MAX_MEASURED_STEP_S
from ludus.trainer.classic.agent import PpoAgent
from ludus.trainer.classic.environments import make_environments
from ludus.trainer.classic.policy import NetworkPolicy
from ludus.trainer.core.devices import use_torch_threads

_NUM_PROBE_STEPS = 8
"""Number of steps of each environment in a short training step."""


class _StepTooLongError(Exception):
    """The environments need too much time."""


@dataclass(slots=True)
class _Stopwatch:
    """The time of playing in one training step, which it interrupts after `MAX_MEASURED_STEP_S`."""

    start_s: float
    play_s: float = 0.0

    def __call__(self, *_: object) -> None:
        self.play_s = time.monotonic() - self.start_s
        if self.play_s > MAX_MEASURED_STEP_S:
            raise _StepTooLongError


def measure_step(run: NetworkRun, policy: NetworkPolicy) -> float | None:
    """Measure one training step of an initial policy, which changes the policy.

    Returns:
        The seconds of the step, or None if it may take longer than `MAX_MEASURED_STEP_S`.
    """
    num_steps, num_epochs = run.ppo.steps_per_environment, run.ppo.num_epochs
    num_probe_steps = min(_NUM_PROBE_STEPS, num_steps)
    probe = run.ppo.model_copy(update={"steps_per_environment": num_probe_steps, "num_epochs": 1})
    try:
        # The first update also initializes torch.
        _time_step(run, policy, probe)
        play_s, update_s = _time_step(run, policy, probe)
        if (play_s + update_s * num_epochs) * num_steps / num_probe_steps > MAX_MEASURED_STEP_S:
            return None
        return sum(_time_step(run, policy, run.ppo))
    except _StepTooLongError:
        return None


def _time_step(
    run: NetworkRun, policy: NetworkPolicy, ppo: NetworkPpoConfig
) -> tuple[float, float]:
    """Train one step in new environments; return the seconds of playing and of the update."""
    environment = run.environment
    with (
        use_torch_threads(ppo.num_threads),
        closing(make_environments(environment, ppo.num_environments)) as environments,
    ):
        agent = PpoAgent(policy, environments, ppo, seed=run.seed, max_steps=environment.max_turns)
        agent.on_step = stopwatch = _Stopwatch(time.monotonic())
        agent.train()
        duration_s = time.monotonic() - stopwatch.start_s
    return stopwatch.play_s, duration_s - stopwatch.play_s
