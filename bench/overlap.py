"""Measure how well the rollout loop and the training loop overlap, each on its own core.

    eta = (T_sync - T_async) / (T_sync - T*)        T* = max(Tg + Sg, Tt + St)

T are seconds per step. T_sync is that of a run with max_staleness = 0, in which the loops take
turns. That run also measures the processor time of each side: Tg + Sg for sampling and loading
weights, Tt + St for training and publishing. T_async is that of the same run with a larger
max_staleness. eta = 1 means that the slower side never waits.

The first part is a simulation in virtual time with the buffer and the admission of training. Both
sides are equally busy, each slot plays eight groups per step, and durations are log-normal (sigma
1), so that the longest group of a batch takes longer than a step. The second part is real runs of
bench/overlap.toml. Their rollout worker and environment server are pinned to one core, and the
learner, buffer and training loop to another. Prints one line of JSON.

    python bench/overlap.py [--samples 5] [--simulation-only]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ludus.proto.config import TrainingConfig  # noqa: E402
from ludus.proto.runs import read_metrics  # noqa: E402
from tests.data.simulation import Plan, Simulation  # noqa: E402

CONFIG = ROOT / "bench" / "overlap.toml"
MAX_STALENESS = 2
NUM_WARM_STEPS = 5
"""Number of first steps that are not counted, while caches fill."""
GENERATOR_CORE, LEARNER_CORE = 0, 1
ON_GENERATOR_CORE = ("ray::RolloutWorkerActor", "-m ludus.env ")
ON_LEARNER_CORE = ("ray::LearnerActor", "ray::BufferActor", "-m ludus.trainer train")
POLL_INTERVAL_S = 0.2
TIMEOUT_S = 600

SIMULATED_STALENESS = 4
SIMULATED_GROUPS_PER_STEP = 256
SIMULATED_SLOTS = 32
SIMULATED_STEPS = 100
SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds per step of a run with alternating loops and of a run with overlapping loops."""

    max_staleness: int
    sync_s: float
    async_s: float
    generate_s: float
    """Busy time of the rollout side, Tg + Sg."""
    train_s: float
    """Busy time of the training side, Tt + St."""
    generator_idle_s: float
    """Idle time of the rollout worker in the overlapping run: empty slots."""
    learner_idle_s: float
    """Time in which the learner of the overlapping run waited for a batch."""
    oldest_sample: float
    """Highest staleness, in versions."""
    trained_over_generated_tokens: float | None = None
    """Share of the sampled tokens that were trained; only of a real run."""
    sampler_pause_fraction: float | None = None
    """Share of a step in which sampling was paused for new weights; only of a real run."""

    @property
    def efficiency(self) -> float:
        """Efficiency of the overlap, eta."""
        ideal_s = max(self.generate_s, self.train_s)
        return (self.sync_s - self.async_s) / (self.sync_s - ideal_s)

    @property
    def slower_side_idle(self) -> float:
        """Share of a step in which the slower side waited."""
        rollout_is_slower = self.generate_s > self.train_s
        return (self.generator_idle_s if rollout_is_slower else self.learner_idle_s) / self.async_s


def simulate(max_staleness: int, window_fraction: float, seed: int) -> Overlap:
    """Simulate the two loops with log-normal durations and equally busy sides."""
    draw = random.Random(seed)
    num_groups = SIMULATED_GROUPS_PER_STEP * (SIMULATED_STEPS + SIMULATED_STALENESS + 2)
    # The mean duration is 1 s.
    durations = [draw.lognormvariate(-(SIGMA**2) / 2, SIGMA) for _ in range(num_groups)]
    busy_s = SIMULATED_GROUPS_PER_STEP / SIMULATED_SLOTS

    def run(staleness: int) -> Simulation:
        plan = Plan(
            groups_per_step=SIMULATED_GROUPS_PER_STEP,
            max_staleness=staleness,
            window_fraction=window_fraction,
            num_slots=SIMULATED_SLOTS,
            durations=durations,
            outcomes=["trained"],
            train_s=busy_s,
            deliver_s=0.0,
            num_steps=SIMULATED_STEPS,
        )
        simulation = Simulation(plan)
        simulation.run()
        return simulation

    alternating, overlapping = run(0), run(max_staleness)
    async_s = overlapping.now_s / SIMULATED_STEPS
    staleness = [
        step - group.policy_version
        for step, groups in enumerate(overlapping.trained_batches)
        for group in groups
    ]
    return Overlap(
        max_staleness=max_staleness,
        sync_s=alternating.now_s / SIMULATED_STEPS,
        async_s=async_s,
        generate_s=busy_s,
        train_s=busy_s,
        generator_idle_s=async_s - overlapping.played_s / SIMULATED_SLOTS / SIMULATED_STEPS,
        learner_idle_s=overlapping.learner_waited_s / SIMULATED_STEPS,
        oldest_sample=max(staleness),
    )


@dataclass(frozen=True, slots=True)
class _Busy:
    """Processor time of both sides until the end of a step."""

    step: int
    generator_s: float
    learner_s: float


@dataclass(frozen=True, slots=True)
class _Means:
    """Means over the steps of one real run."""

    seconds: dict[str, float]
    generator_busy_s: float
    learner_busy_s: float
    oldest_sample: float
    trained_over_generated_tokens: float
    sampler_pause_s: float


def measure(max_staleness: int) -> Overlap:
    """Run once with alternating and once with overlapping loops, and compare them."""
    with tempfile.TemporaryDirectory() as folder:
        alternating = _run(Path(folder), 0)
        overlapping = _run(Path(folder), max_staleness)
    return Overlap(
        max_staleness=max_staleness,
        sync_s=alternating.seconds["step_s"],
        async_s=overlapping.seconds["step_s"],
        generate_s=alternating.generator_busy_s,
        train_s=alternating.learner_busy_s,
        generator_idle_s=overlapping.seconds["rollout_idle_s"],
        learner_idle_s=overlapping.seconds["wait_for_batch_s"],
        oldest_sample=overlapping.oldest_sample,
        trained_over_generated_tokens=overlapping.trained_over_generated_tokens,
        sampler_pause_fraction=overlapping.sampler_pause_s / overlapping.seconds["step_s"],
    )


def _run(folder: Path, max_staleness: int) -> _Means:
    name = f"overlap-{max_staleness}"
    settings = (f"name={name}", f"output_dir={folder}", f"training.max_staleness={max_staleness}")
    sets = [argument for setting in settings for argument in ("--set", setting)]
    ludus = Path(sys.executable).parent / "ludus"
    process = subprocess.Popen(
        [str(ludus), "train", str(CONFIG), "--overwrite", *sets],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline_s = time.monotonic() + TIMEOUT_S
    samples: list[_Busy] = []
    try:
        while process.poll() is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{name} did not finish within {TIMEOUT_S} s")
            samples.append(_sample(folder / name))
            time.sleep(POLL_INTERVAL_S)
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{name} exited with code {process.returncode}")
    return _compute_means(folder / name, samples)


def _sample(run_path: Path) -> _Busy:
    """Pin both sides to their cores and return their processor time so far."""
    file = run_path / "metrics.jsonl"
    step = file.read_text(encoding="utf-8").count('"kind":"train"') if file.exists() else 0
    return _Busy(
        step,
        sum(_pin(process, GENERATOR_CORE) for process in _processes(ON_GENERATOR_CORE)),
        sum(_pin(process, LEARNER_CORE) for process in _processes(ON_LEARNER_CORE)),
    )


def _processes(patterns: Sequence[str]) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has exited
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if any(pattern in command for pattern in patterns):
                yield process


def _pin(process: Path, core: int) -> float:
    """Pin all threads of a process to a core and return its processor time in seconds."""
    with contextlib.suppress(OSError):
        for thread in (process / "task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
        user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _compute_means(run_path: Path, samples: Sequence[_Busy]) -> _Means:
    rows = read_metrics(run_path)
    trained = [row for row in rows if row.kind == "train"]
    steps = trained[NUM_WARM_STEPS:]
    pauses = [row.values["sampler_pause_s"] for row in rows if row.kind == "weights"]
    # The samples between the first counted step and the last step.
    counted = [busy for busy in samples if NUM_WARM_STEPS <= busy.step < len(trained)]
    first, last = counted[0], counted[-1]
    return _Means(
        {
            name: statistics.fmean(row.values[name] for row in steps)
            for name in ("step_s", "wait_for_batch_s", "rollout_idle_s")
        },
        (last.generator_s - first.generator_s) / (last.step - first.step),
        (last.learner_s - first.learner_s) / (last.step - first.step),
        max(row.values["staleness_max"] for row in trained),
        sum(row.values["num_tokens_trained"] for row in trained)
        / sum(row.values["num_tokens_generated"] for row in trained),
        statistics.median(pauses),
    )


def _row(samples: Sequence[Overlap]) -> dict[str, object]:
    return {
        "efficiency": statistics.median(sample.efficiency for sample in samples),
        "slower_side_idle_fraction": statistics.median(
            sample.slower_side_idle for sample in samples
        ),
        "trained_over_generated_tokens": _median(
            sample.trained_over_generated_tokens for sample in samples
        ),
        "sampler_pause_fraction": _median(sample.sampler_pause_fraction for sample in samples),
        "oldest_sample": max(sample.oldest_sample for sample in samples),
        "samples": [asdict(sample) for sample in samples],
    }


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median; None for a simulation, which has no such values."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def _simulate_all(num_samples: int) -> Iterator[tuple[str, dict[str, object]]]:
    window_fraction = TrainingConfig().window_fraction
    for staleness in range(1, SIMULATED_STALENESS + 1):
        samples = [simulate(staleness, window_fraction, seed) for seed in range(num_samples)]
        yield f"max_staleness_{staleness}", _row(samples)
    strict_order = [simulate(SIMULATED_STALENESS, 1e-9, seed) for seed in range(num_samples)]
    yield f"max_staleness_{SIMULATED_STALENESS}_without_window", _row(strict_order)


def _measure_all(num_samples: int) -> Iterator[Overlap]:
    for number in range(1, num_samples + 1):
        sample = measure(MAX_STALENESS)
        print(
            f"real run {number} of {num_samples}: efficiency {sample.efficiency:.3f}, "
            f"slower side idle {sample.slower_side_idle:.3f}",
            file=sys.stderr,
            flush=True,
        )
        yield sample


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--simulation-only", action="store_true")
    args = parser.parse_args()
    result: dict[str, object] = {
        "headline": f"max_staleness_{SIMULATED_STALENESS}",
        "simulation": dict(_simulate_all(args.samples)),
    }
    if not args.simulation_only:
        result["real"] = _row(list(_measure_all(args.samples)))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
