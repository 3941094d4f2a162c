"""How much of what could overlap does: rollout loop and training loop, each on its own core.

    eta = (T_sync - T_async) / (T_sync - T*)        T* = max(Tg + Sg, Tt + St)

T are seconds per step: T_sync of a run with max_staleness = 0, in which the two loops take turns
and which also tells how long each side is busy (Tg + Sg sampling and its weights, Tt + St training
and publishing: processor time on its core), T_async of the same run with a larger max_staleness.
1 = the slower side never waits.

Once in virtual time, with the buffer and the admission that training uses, both sides equally
busy, eight episodes one after the other in each place per step, and episode lengths from a
log-normal distribution (sigma 1): the longest of a batch takes longer than a whole step. And once
in real runs of bench/overlap.toml, whose rollout worker and environment server are pinned to one
core, and the learner with buffer and training loop to another. Prints one line of JSON.

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
"""First steps that are not counted: caches fill, and two loops fall into step."""
GENERATOR_CORE, LEARNER_CORE = 0, 1
ON_GENERATOR_CORE = ("ray::RolloutWorkerActor", "-m ludus.env ")
ON_LEARNER_CORE = ("ray::LearnerActor", "ray::BufferActor", "-m ludus.trainer train")
POLL_INTERVAL_S = 0.2
TIMEOUT_S = 600

SIMULATED_STALENESS = 4
SIMULATED_GROUPS_PER_STEP = 256
SIMULATED_PLACES = 32
SIMULATED_STEPS = 100
SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """One strict and one overlapped run; seconds per step."""

    max_staleness: int
    sync_s: float
    async_s: float
    generate_s: float
    """Tg + Sg."""
    train_s: float
    """Tt + St."""
    generator_idle_s: float
    """Of the overlapped run: no group was played, or places were empty."""
    learner_idle_s: float
    """Of the overlapped run: the learner waited for a batch."""
    oldest_sample: float
    """Versions between the weights that sampled and those that were trained, at most."""
    trained_over_generated_tokens: float | None = None
    """Of a real run."""
    sampler_pause_fraction: float | None = None
    """Of a step of a real run, in which sampling stood still for new weights."""

    @property
    def efficiency(self) -> float:
        """eta."""
        ideal_s = max(self.generate_s, self.train_s)
        return (self.sync_s - self.async_s) / (self.sync_s - ideal_s)

    @property
    def slower_side_idle(self) -> float:
        """Share of a step in which the side that takes longer waited."""
        generates = self.generate_s > self.train_s
        return (self.generator_idle_s if generates else self.learner_idle_s) / self.async_s


def simulate(max_staleness: int, window_fraction: float, seed: int) -> Overlap:
    """What the two loops make of log-normal episode lengths, both sides equally busy."""
    draw = random.Random(seed)
    num_groups = SIMULATED_GROUPS_PER_STEP * (SIMULATED_STEPS + SIMULATED_STALENESS + 2)
    # The mean is 1 s.
    durations = [draw.lognormvariate(-(SIGMA**2) / 2, SIGMA) for _ in range(num_groups)]
    busy_s = SIMULATED_GROUPS_PER_STEP / SIMULATED_PLACES

    def run(staleness: int) -> Simulation:
        plan = Plan(
            groups_per_step=SIMULATED_GROUPS_PER_STEP,
            max_staleness=staleness,
            window_fraction=window_fraction,
            num_slots=SIMULATED_PLACES,
            durations=durations,
            outcomes=["trained"],
            train_s=busy_s,
            deliver_s=0.0,
            num_steps=SIMULATED_STEPS,
        )
        simulation = Simulation(plan)
        simulation.run()
        return simulation

    strict, loose = run(0), run(max_staleness)
    async_s = loose.now_s / SIMULATED_STEPS
    ages = [
        step - group.policy_version for step, groups in enumerate(loose.trained) for group in groups
    ]
    return Overlap(
        max_staleness=max_staleness,
        sync_s=strict.now_s / SIMULATED_STEPS,
        async_s=async_s,
        generate_s=busy_s,
        train_s=busy_s,
        generator_idle_s=async_s - loose.played_s / SIMULATED_PLACES / SIMULATED_STEPS,
        learner_idle_s=loose.learner_waited_s / SIMULATED_STEPS,
        oldest_sample=max(ages),
    )


@dataclass(frozen=True, slots=True)
class _Busy:
    """Processor time of both sides when a step had been trained."""

    step: int
    generator_s: float
    learner_s: float


@dataclass(frozen=True, slots=True)
class _Means:
    """Of the steps of one real run."""

    seconds: dict[str, float]
    generator_busy_s: float
    learner_busy_s: float
    oldest_sample: float
    trained_over_generated_tokens: float
    sampler_pause_s: float


def measure(max_staleness: int) -> Overlap:
    """What one strict and one overlapped run took, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        strict = _run(Path(folder), 0)
        loose = _run(Path(folder), max_staleness)
    return Overlap(
        max_staleness=max_staleness,
        sync_s=strict.seconds["step_s"],
        async_s=loose.seconds["step_s"],
        generate_s=strict.generator_busy_s,
        train_s=strict.learner_busy_s,
        generator_idle_s=loose.seconds["rollout_idle_s"],
        learner_idle_s=loose.seconds["wait_for_batch_s"],
        oldest_sample=loose.oldest_sample,
        trained_over_generated_tokens=loose.trained_over_generated_tokens,
        sampler_pause_fraction=loose.sampler_pause_s / loose.seconds["step_s"],
    )


def _run(folder: Path, max_staleness: int) -> _Means:
    name = f"overlap-{max_staleness}"
    settings = (f"name={name}", f"output_dir={folder}", f"training.max_staleness={max_staleness}")
    sets = [argument for one in settings for argument in ("--set", one)]
    ludus = Path(sys.executable).parent / "ludus"
    running = subprocess.Popen(
        [str(ludus), "train", str(CONFIG), "--overwrite", *sets],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline_s = time.monotonic() + TIMEOUT_S
    seen: list[_Busy] = []
    try:
        while running.poll() is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{name} expected to end within {TIMEOUT_S} s")
            seen.append(_look(folder / name))
            time.sleep(POLL_INTERVAL_S)
    finally:
        running.terminate()
        running.wait()
    if running.returncode:
        raise RuntimeError(f"{name} ended with exit code {running.returncode}")
    return _means(folder / name, seen)


def _look(run_path: Path) -> _Busy:
    """How busy both sides have been so far; they are on their cores from now on."""
    file = run_path / "metrics.jsonl"
    step = file.read_text(encoding="utf-8").count('"kind":"train"') if file.exists() else 0
    return _Busy(
        step,
        sum(_pinned(process, GENERATOR_CORE) for process in _processes(ON_GENERATOR_CORE)),
        sum(_pinned(process, LEARNER_CORE) for process in _processes(ON_LEARNER_CORE)),
    )


def _processes(patterns: Sequence[str]) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended in between
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if any(pattern in command for pattern in patterns):
                yield process


def _pinned(process: Path, core: int) -> float:
    """Seconds of processor time that it has used; all its threads are on `core` from now on."""
    with contextlib.suppress(OSError):
        for thread in (process / "task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
        user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _means(run_path: Path, seen: Sequence[_Busy]) -> _Means:
    rows = read_metrics(run_path)
    trained = [row for row in rows if row.kind == "train"]
    steps = trained[NUM_WARM_STEPS:]
    pauses = [row.values["sampler_pause_s"] for row in rows if row.kind == "weights"]
    # While steps are trained, and before what ends a run.
    during = [busy for busy in seen if NUM_WARM_STEPS <= busy.step < len(trained)]
    first, last = during[0], during[-1]
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
        "efficiency": statistics.median(one.efficiency for one in samples),
        "slower_side_idle_fraction": statistics.median(one.slower_side_idle for one in samples),
        "trained_over_generated_tokens": _median(
            one.trained_over_generated_tokens for one in samples
        ),
        "sampler_pause_fraction": _median(one.sampler_pause_fraction for one in samples),
        "oldest_sample": max(one.oldest_sample for one in samples),
        "samples": [asdict(one) for one in samples],
    }


def _median(values: Iterable[float | None]) -> float | None:
    """None in virtual time, in which nothing is measured but who waits."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def _simulated(num_samples: int) -> Iterator[tuple[str, dict[str, object]]]:
    windowed = TrainingConfig().window_fraction
    for staleness in range(1, SIMULATED_STALENESS + 1):
        samples = [simulate(staleness, windowed, seed) for seed in range(num_samples)]
        yield f"max_staleness_{staleness}", _row(samples)
    strict_order = [simulate(SIMULATED_STALENESS, 1e-9, seed) for seed in range(num_samples)]
    yield f"max_staleness_{SIMULATED_STALENESS}_without_window", _row(strict_order)


def _measured(num_samples: int) -> Iterator[Overlap]:
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
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--simulation-only", action="store_true")
    args = parser.parse_args()
    result: dict[str, object] = {
        "headline": f"max_staleness_{SIMULATED_STALENESS}",
        "simulation": dict(_simulated(args.samples)),
    }
    if not args.simulation_only:
        result["real"] = _row(list(_measured(args.samples)))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
