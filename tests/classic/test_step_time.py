"""The measurement of a training step in a dry run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from ludus.proto.config import NetworkRun
from ludus.proto.config.load import load_run_config
from ludus.proto.runs import STEP_TIME_PREFIX, Resume
from ludus.trainer.classic import step_time
from ludus.trainer.classic.environments import make_environments
from ludus.trainer.classic.run import check, make_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole" / "ppo.toml"
SETTINGS = ("ppo.num_environments=2", "ppo.steps_per_environment=16", "ppo.num_epochs=2")


class FakeClock:
    """A clock that only the environment moves."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class SlowEnv(gymnasium.Env[np.ndarray, int]):
    """An environment whose steps take a given time on the fake clock."""

    clock = FakeClock()
    step_s = 0.0
    num_steps = 0
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        SlowEnv.num_steps += 1
        self.clock.now_s += self.step_s
        return np.zeros(2, np.float32), 1.0, False, False, {}


gymnasium.register("ludus-tests/Slow-v0", SlowEnv, max_episode_steps=20)


def measure(monkeypatch: pytest.MonkeyPatch, step_s: float) -> float | None:
    """Measure a step of 16 steps in each of two environments."""
    monkeypatch.setattr(step_time, "time", SlowEnv.clock)
    monkeypatch.setattr(SlowEnv, "step_s", step_s)
    monkeypatch.setattr(SlowEnv, "num_steps", 0)
    run = make_run("environment.package=gymnasium:ludus-tests/Slow-v0")
    with closing(make_environments(run.environment, 1)) as environments:
        policy = make_policy(run, environments)
    return step_time.measure_step(run, policy)


def make_run(*settings: str) -> NetworkRun:
    run = load_run_config(EXAMPLE, [*SETTINGS, *settings])
    assert isinstance(run, NetworkRun)
    return run


def test_short_step_is_measured_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, 0.0625) == 32 * 0.0625


def test_step_above_the_limit_is_only_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, 0.125) is None
    assert SlowEnv.num_steps == 2 * 2 * 8


def test_slow_environment_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, 2.0) is None
    assert SlowEnv.num_steps == 2


def test_check_prints_the_time_of_a_step_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(f"output_dir={tmp_path / 'runs'}")
    check(run, resume=Resume.NEVER, overwrite=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert float(line.removeprefix(STEP_TIME_PREFIX)) > 0
    assert not list(tmp_path.iterdir())
