"""Train the classic PPO examples, and compare CartPole with stable-baselines3.

    cartpole      examples/cartpole/ppo.toml and stable-baselines3's PPO with the settings of
                  rl-baselines3-zoo, in turns: 475 of 500 or more in 100 episodes, in at most half
                  of stable-baselines3's seconds
    lunar_lander  examples/lunar_lander/ppo.toml: 200 or more
    pendulum      examples/pendulum/ppo.toml: -200 or more
    frozen_lake   examples/frozen_lake/ppo.toml: 1 in every episode
    value         a reward of 1 per step, gamma .99, episodes truncated at 500 steps: V = 100 +- 2
    shuffled      the control: pendulum with shuffled rewards must not learn

All returns are means of 100 episodes of the most likely action. The first of their seeds are those
of the evaluations during training. On CartPole, both trainers are evaluated on 25 episodes every
2,048 steps. If the mean return is at least 480 there and on 100 other episodes, training stops.
`training_s` is the time of playing and updating, `total_s` includes all evaluations, and `core_s`
is the processor time of `total_s`. Starts of processes, imports and construction are not counted.
Results go to bench/results/classic.json, which keeps rows of earlier calls on the same machine.

    make bench-classic
    python bench/classic.py --only cartpole --seeds 0 1 2

The exit code is 1 if a measurement of this call missed its target.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from machine import machine, read_earlier_runs, write_runs

from ludus.proto.config import NetworkModel, NetworkPpoConfig, NetworkRun, load_run_config
from ludus.proto.runs import SUMMARY_FILE, Resume, Summary
from ludus.trainer.classic.agent import PpoAgent
from ludus.trainer.classic.environments import GymnasiumEnvironments
from ludus.trainer.classic.policy import NetworkPolicy, make_networks
from ludus.trainer.classic.run import open_network_run
from ludus.trainer.core.devices import use_torch_threads

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs"
RESULTS = ROOT / "bench" / "results" / "classic.json"
STABLE_BASELINES = "stable-baselines3==2.9.2"
SEEDS = (0, 1, 2)
NUM_ERROR_LINES = 5
BALANCED_RETURN = 475.0
"""Mean return of CartPole above which the pole counts as balanced."""
MAX_SHARE = 0.5
"""Highest share of stable-baselines3's seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one training."""

    part: str
    trainer: str
    seed: int
    mean_return: float
    """Mean return of 100 episodes. For `value`, the predicted value of the only state."""
    target: str
    passed: bool
    num_env_steps: int
    training_s: float
    total_s: float
    core_s: float
    load_average: float
    """Load average of the machine in the minute before."""
    error: str = ""
    machine: str = field(default_factory=machine)

    @property
    def key(self) -> tuple[str, str, int]:
        """Key of the measurement, which a new row replaces."""
        return self.part, self.trainer, self.seed


@dataclass(frozen=True, slots=True)
class Case:
    """An example with the mean return that it must reach or, as a control, must not reach."""

    example: str
    min_return: float | None = None
    max_return: float | None = None
    overrides: tuple[str, ...] = ()


CASES = {
    "lunar_lander": Case("lunar_lander", min_return=200.0),
    "pendulum": Case("pendulum", min_return=-200.0),
    "frozen_lake": Case("frozen_lake", min_return=1.0),
    # Random torque has a mean return of about -1,200, no torque about -1,000.
    "shuffled": Case(
        "pendulum",
        max_return=-800.0,
        overrides=("training.shuffle_rewards=true", "training.num_steps=20"),
    ),
}
PARTS = ("cartpole", *CASES, "value")


class ConstantReward(gymnasium.Env[np.ndarray, int]):
    """An environment with a reward of 1 per step; only a limit ends its episodes."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=arguments.get("seed"))
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, dtype=np.float32), 1.0, False, False, {}


gymnasium.register("ConstantReward-v0", lambda **_: ConstantReward(), max_episode_steps=500)


def main() -> int:
    """Return the exit code: 1 if a measurement missed its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    chosen = parser.parse_args()
    rows = {row.key: row for row in _read_earlier_rows()}
    new_rows: list[Row] = []
    for part in chosen.only:
        for row in _measure(part, chosen.seeds):
            rows[row.key] = row
            new_rows.append(row)
            print(_format_line(row), flush=True)
            _write(list(rows.values()))
    comparison = _make_comparison(list(rows.values()))
    if "cartpole" in chosen.only and comparison is not None:
        print(
            f"cartpole: {comparison['training_s']:.2f} of stable-baselines3's seconds of training, "
            f"{comparison['total_s']:.2f} with evaluations, medians (at most {MAX_SHARE})"
        )
        if comparison["training_s"] > MAX_SHARE:
            return 1
    return 0 if all(row.passed for row in new_rows) else 1


def _measure(part: str, seeds: Sequence[int]) -> Iterator[Row]:
    if part == "cartpole":
        yield from _cartpole(seeds)
        return
    for seed in seeds:
        yield _value(seed) if part == "value" else _example(part, CASES[part], seed)


def _cartpole(seeds: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of Ludus and of stable-baselines3, which train in turns."""
    with _stable_baselines() as process, use_torch_threads(1):
        for seed in seeds:
            run = _load_run("cartpole", seed)
            steps = run.ppo.num_environments * run.ppo.steps_per_environment
            task = {
                "seed": seed,
                "evaluate_every": steps * run.eval.every_steps,
                "num_games": run.eval.num_games_during,
                "num_games_confirm": run.eval.num_games,
                "target": run.ppo.target_return,
                "judged_from": run.eval.seed,
            }
            for trainer in ("ludus", "stable-baselines3"):
                load = os.getloadavg()[0]
                values = _train(run) if trainer == "ludus" else _request(process, task)
                passed = values["mean_return"] >= BALANCED_RETURN
                target = f"at least {BALANCED_RETURN:g}"
                yield Row(
                    "cartpole",
                    trainer,
                    seed,
                    **values,
                    target=target,
                    passed=passed,
                    load_average=load,
                )


def _train(run: NetworkRun) -> dict[str, Any]:
    """Train the run in this process and return its results."""
    with open_network_run(run, resume=Resume.NEVER, overwrite=True) as opened_run:
        start_s, start_core_s = time.perf_counter(), time.process_time()
        summary = opened_run.train()
        total_s = time.perf_counter() - start_s
        core_s = time.process_time() - start_core_s
        return {
            "mean_return": summary.expected_return,
            "num_env_steps": opened_run.state.num_env_steps,
            "training_s": summary.wall_seconds_training,
            "total_s": total_s,
            "core_s": core_s,
        }


@contextmanager
def _stable_baselines() -> Iterator[subprocess.Popen[str]]:
    """Start a process that trains with stable-baselines3, in a separate virtual environment."""
    maker = ROOT / "dev" / "upstream_environment.py"
    extra = [f"{name}=={version(name)}" for name in ("torch", "gymnasium")]
    maker_process = subprocess.run(
        [sys.executable, maker, STABLE_BASELINES, "--extra", *extra],
        capture_output=True,
        text=True,
        check=True,
    )
    program = ROOT / "bench" / "upstream" / "sb3_cartpole.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [maker_process.stdout.strip(), program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _request(process: subprocess.Popen[str], task: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    values: dict[str, Any] = json.loads(process.stdout.readline())
    return values


def _example(part: str, case: Case, seed: int) -> Row:
    """Train an example with the command line and return its row."""
    load, start_usage = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    overrides = [*_make_overrides(part, seed), *case.overrides]
    settings = [word for override in overrides for word in ("--set", override)]
    ludus = Path(sys.executable).parent / "ludus"
    start_s = time.perf_counter()
    process = subprocess.run(
        [ludus, "train", _file(case.example), "--overwrite", *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    total_s, end_usage = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    user_s = end_usage.ru_utime - start_usage.ru_utime
    core_s = user_s + end_usage.ru_stime - start_usage.ru_stime
    is_control = case.max_return is not None
    bound = case.max_return if is_control else case.min_return
    target = f"{'at most' if is_control else 'at least'} {bound:g}"
    if process.returncode:
        error = "\n".join(process.stderr.strip().splitlines()[-NUM_ERROR_LINES:])
        return Row(part, "ludus", seed, 0.0, target, False, 0, 0.0, total_s, core_s, load, error)
    run = load_run_config(_file(case.example), overrides)
    assert isinstance(run, NetworkRun)
    summary = Summary.model_validate_json((RUNS / run.name / SUMMARY_FILE).read_bytes())
    mean_return = summary.expected_return
    assert bound is not None
    env_steps_per_step = run.ppo.num_environments * run.ppo.steps_per_environment
    return Row(
        part=part,
        trainer="ludus",
        seed=seed,
        mean_return=mean_return,
        target=target,
        passed=mean_return <= bound if is_control else mean_return >= bound,
        num_env_steps=summary.num_steps * env_steps_per_step,
        training_s=summary.wall_seconds_training,
        total_s=total_s,
        core_s=core_s,
        load_average=load,
    )


def _value(seed: int) -> Row:
    """Train on `ConstantReward` and return its row; the exact value is 1 / (1 - gamma)."""
    config = NetworkPpoConfig(
        num_environments=4,
        steps_per_environment=500,
        minibatch_size=250,
        learning_rate=3e-2,
        schedule="constant",
        gamma=0.99,
        lam=1.0,
        max_grad_norm=1e6,
    )
    load, start_s, start_core_s = os.getloadavg()[0], time.perf_counter(), time.process_time()
    environments = GymnasiumEnvironments("ConstantReward-v0", config.num_environments, {})
    env_spaces = environments.observation_space, environments.action_space
    torch.manual_seed(seed)
    policy = NetworkPolicy(*make_networks(NetworkModel(hidden=(32,)), *env_spaces), *env_spaces)
    agent = PpoAgent(policy, environments, config, seed=seed)
    num_updates = 30
    with use_torch_threads(1):
        for _ in range(num_updates):
            agent.train()
    value, total_s = policy.predict_values(torch.zeros(1, 1)).item(), time.perf_counter() - start_s
    return Row(
        part="value",
        trainer="ludus",
        seed=seed,
        mean_return=value,
        target="100 within 2",
        passed=abs(value - 100.0) <= 2.0,
        num_env_steps=num_updates * config.num_environments * config.steps_per_environment,
        training_s=total_s,
        total_s=total_s,
        core_s=time.process_time() - start_core_s,
        load_average=load,
    )


def _file(example: str) -> Path:
    return ROOT / "examples" / example / "ppo.toml"


def _make_overrides(part: str, seed: int) -> list[str]:
    return [f"name=bench-classic-{part}-{seed}", f"output_dir={RUNS}", f"seed={seed}"]


def _load_run(part: str, seed: int) -> NetworkRun:
    run = load_run_config(_file(part), _make_overrides(part, seed))
    assert isinstance(run, NetworkRun)
    return run


def _format_line(row: Row) -> str:
    head = f"{row.part:<14}{row.trainer:<19}seed {row.seed}  "
    if row.error:
        return f"{head}FAILED: {row.error}"
    return (
        f"{head}{row.mean_return:9.1f}  {row.target:<15}{'ok' if row.passed else 'MISSED':<8}"
        f"{row.num_env_steps:>9,} steps  {row.training_s:6.1f} s training, {row.total_s:6.1f} s "
        f"in all, {row.core_s:6.1f} s of a core, load {row.load_average:.1f}"
    )


def _make_comparison(rows: Sequence[Row]) -> dict[str, float] | None:
    """Return the ratios of Ludus's median times to stable-baselines3's, by kind of time."""
    ratios = {}
    for kind in ("training_s", "total_s", "core_s"):
        by_trainer = {
            trainer: [
                getattr(row, kind)
                for row in rows
                if row.part == "cartpole" and row.trainer == trainer
            ]
            for trainer in ("ludus", "stable-baselines3")
        }
        if not all(by_trainer.values()):
            return None
        ludus_s, baselines_s = (statistics.median(seconds) for seconds in by_trainer.values())
        ratios[kind] = ludus_s / baselines_s
    return ratios


def _compute_medians(rows: Sequence[Row]) -> list[dict[str, object]]:
    names = dict.fromkeys((row.part, row.trainer) for row in rows)
    medians: list[dict[str, object]] = []
    for name in names:
        group = [row for row in rows if (row.part, row.trainer) == name]
        medians.append(
            {
                "part": name[0],
                "trainer": name[1],
                "num_passed": sum(row.passed for row in group),
                "num_seeds": len(group),
                **{
                    kind: statistics.median(getattr(row, kind) for row in group)
                    for kind in ("mean_return", "num_env_steps", "training_s", "total_s", "core_s")
                },
            }
        )
    return medians


def _write(rows: list[Row]) -> None:
    rows.sort(key=lambda row: (PARTS.index(row.part), row.seed, row.trainer))
    write_runs(
        RESULTS,
        "make bench-classic",
        [asdict(row) for row in rows],
        stable_baselines3=STABLE_BASELINES,
        cartpole_ludus_over_stable_baselines3=_make_comparison(rows),
        medians=_compute_medians(rows),
    )


def _read_earlier_rows() -> list[Row]:
    """Return the rows of earlier calls on this machine, because times are compared."""
    return [Row(**run) for run in read_earlier_runs(RESULTS) if run["machine"] == machine()]


if __name__ == "__main__":
    sys.exit(main())
