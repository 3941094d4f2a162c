"""Stop runs of each kind by a signal at random moments, resume them, and compare the results.

    language_model  on-policy GRPO on blackjack, two updates per step
    long_steps      the same, but each step of the learner takes 90 s until it is resumed
    network         classic PPO on CartPole
    reward_model    a reward model on generated comparisons

Each run starts, gets SIGINT or SIGTERM after a random time, and is resumed to its end. If a run
finishes its last step before the signal arrives, it is discarded and replaced by a new run. For
each stop, a row has the exit code, the seconds from the signal to the exit, the last step that was
recorded, the step of the checkpoint, and whether the final weights equal those of a run without a
stop. Results go to bench/results/stops.json.

    python bench/stops.py
    python bench/stops.py --only network reward_model --moments 3 --seed 1

The exit code is 1 if a stop took longer than 20 s, lost more than a step, or changed the weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import machine, write_runs
from safetensors.torch import load_file
from torch import Tensor

from ludus.proto.runs import read_metrics
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from ludus.trainer.run.checkpoint import list_checkpoints, parse_checkpoint_step

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "stops.json"
MAX_EXIT_S = 20.0
MAX_ATTEMPTS_PER_STOP = 3
LONG_STEP_S = 90.0
CALL_DELAY_VARIABLE = "LUDUS_BENCH_CALL_DELAY_S"
"""Variable with the seconds that each call of `delayed_loss` takes."""
CALLS_PER_STEP = 18
"""Number of micro-batches, and so of calls of the loss, in a step of the language model."""
START_S = 12.0
"""Approximate time until a run of a language model trains its first step."""
INTERRUPTED_EXIT_CODES = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a stop; the negative ones before the trainer has its handlers."""

LANGUAGE_MODEL = (
    *("training.num_steps=12", "training.groups_per_step=16", "training.max_staleness=0"),
    *("rollout.num_groups_in_flight=32", "learner.num_minibatches=2", "learner.warmup_steps=0"),
    *("learner.schedule=constant", "learner.max_tokens_per_micro_batch=64"),
    *("algorithm.kl_coef_final=null", "algorithm.correction.kind=off"),
    *("algorithm.geometric_mask=null", "algorithm.loss.kind=function"),
    *("algorithm.loss.function=stops:delayed_loss", "model.warm_start_games=256"),
    *("eval.num_games=100", "eval.num_games_during=0", "environment.baselines=[]"),
    *("environment.random_policy=null", "environment.optimal_policy=null"),
)
NETWORK = (
    *("training.num_steps=150", "training.checkpoint_every_steps=1000", "ppo.num_epochs=4"),
    *("ppo.target_return=null", "eval.every_steps=5", "eval.num_games=20"),
)


def delayed_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """Return the loss of the policy gradient, after the configured delay."""
    time.sleep(float(os.environ.get(CALL_DELAY_VARIABLE, "0")))
    return -torch.exp(logprobs - old_logprobs) * advantages


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of run."""

    config: Path | None
    settings: Sequence[str]
    max_signal_s: float
    """Latest moment of a signal, in seconds after the start."""
    environment: Mapping[str, str]
    """Variables of the first attempt. The resumed attempt does without them."""
    load_weights: Callable[[Path], dict[str, Tensor]]
    """Function of the run's folder that returns the final weights."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop of a run, and the result of the resumed run."""

    kind: str
    signal: str
    signal_s: float
    """Seconds from the start to the signal."""
    exit_code: int
    exit_s: float
    """Seconds from the signal to the exit."""
    last_step: int
    """Last step that was recorded."""
    saved_step: int
    """Step of the newest checkpoint; 0 if there is none."""
    is_exact: bool
    """True if the final weights equal those of a run that was not stopped."""

    @property
    def is_good(self) -> bool:
        """True if the stop was fast and lost at most a step."""
        is_fast = self.exit_code in INTERRUPTED_EXIT_CODES and self.exit_s <= MAX_EXIT_S
        return is_fast and self.last_step - self.saved_step <= 1 and self.is_exact


def main() -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kind_names = ("language_model", "long_steps", "network", "reward_model")
    parser.add_argument("--only", nargs="+", choices=kind_names, default=kind_names)
    parser.add_argument("--moments", type=int, default=10, help="number of stops of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    args = parser.parse_args()
    # A shell ignores SIGINT for commands in the background, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stops: list[Stop] = []
    with tempfile.TemporaryDirectory(prefix="ludus-stops-") as folder:
        kinds = make_kinds(Path(folder))
        for name in args.only:
            stops += measure(name, kinds[name], Path(folder) / name, args.moments, args.seed)
    write_runs(
        RESULTS,
        f"python bench/stops.py --moments {args.moments} --seed {args.seed}",
        [asdict(stop) for stop in stops],
        machine=machine(),
    )
    return int(not all(stop.is_good for stop in stops))


def make_kinds(folder: Path) -> dict[str, Kind]:
    """Return the kinds of runs; write the data of the reward model into `folder`."""
    reward_settings = write_reward_data(folder / "data")
    blackjack = ROOT / "examples/blackjack/tiny.toml"
    delay = {CALL_DELAY_VARIABLE: str(LONG_STEP_S / CALLS_PER_STEP)}
    return {
        "language_model": Kind(blackjack, LANGUAGE_MODEL, 25.0, {}, load_language_model),
        "long_steps": Kind(
            blackjack, LANGUAGE_MODEL, START_S + 2 * LONG_STEP_S, delay, load_language_model
        ),
        "network": Kind(ROOT / "examples/cartpole/ppo.toml", NETWORK, 12.0, {}, load_network),
        "reward_model": Kind(None, reward_settings, 15.0, {}, load_reward_model),
    }


def write_reward_data(folder: Path) -> list[str]:
    """Write a tiny model and comparisons; return the settings of the reward model."""
    spec = importlib.util.spec_from_file_location(
        "make_preferences", ROOT / "examples/reward_model/make_preferences.py"
    )
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    words, topics = example.WORDS, example.TOPICS
    texts = [f" {word} Tell me about {topic}." for word in words for topic in topics]
    tokenizer = make_tokenizer(texts, example.MODEL.vocab_size)
    save(make_model(example.MODEL, tokenizer, 0), tokenizer, folder / "model")
    data_path = folder / "data.jsonl"
    rows = [
        {"prompt": f"Tell me about {topic}.", "chosen": f"{word} good", "rejected": f"{word} bad"}
        for word in words
        for topic in topics
    ]
    data_path.write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    settings = [f"model={folder / 'model'}", f"data={data_path}", "epochs=2", "batch_size=4"]
    return ["kind=reward_model", *settings]


def measure(name: str, kind: Kind, folder: Path, num_moments: int, seed: int) -> list[Stop]:
    """Stop runs of a kind at random moments, and print and return the stops.

    Raises:
        RuntimeError: Most runs finish before their signal.
    """
    generator = random.Random(f"{name} {seed}")
    reference = folder / "reference"
    finish(start(name, kind, reference, {}))
    expected_weights = kind.load_weights(reference / "run")
    stops: list[Stop] = []
    num_attempts = 0
    while len(stops) < num_moments:
        if num_attempts == MAX_ATTEMPTS_PER_STOP * num_moments:
            raise RuntimeError(
                f"{name}: only {len(stops)} of {num_attempts} signals arrived before the last "
                "step. Lower this kind's max_signal_s."
            )
        attempt = folder / str(num_attempts)
        num_attempts += 1
        signal_s = generator.uniform(0.0, kind.max_signal_s)
        stop_signal = generator.choice([signal.SIGINT, signal.SIGTERM])
        stop = stop_and_resume(name, kind, attempt, expected_weights, signal_s, stop_signal)
        if stop is None:
            print(f"skip {name}: finished before the signal at {signal_s:.1f} s", flush=True)
            continue
        stops.append(stop)
        mark = "ok  " if stop.is_good else "MISS"
        sys.stdout.write(
            f"{mark} {name}: {stop.signal} after {stop.signal_s:.1f} s, exit code "
            f"{stop.exit_code} after {stop.exit_s:.1f} s, step {stop.last_step} recorded, step "
            f"{stop.saved_step} saved, {'equal' if stop.is_exact else 'different'} weights\n"
        )
        sys.stdout.flush()
    return stops


def stop_and_resume(
    name: str,
    kind: Kind,
    folder: Path,
    expected_weights: Mapping[str, Tensor],
    signal_s: float,
    stop_signal: signal.Signals,
) -> Stop | None:
    """Start a run, stop it after `signal_s`, and resume it to its end.

    Returns:
        None if the run finished its last step before the signal.
    """
    process = start(name, kind, folder, kind.environment)
    try:
        process.wait(signal_s)
    except subprocess.TimeoutExpired:
        process.send_signal(stop_signal)
    signal_time_s = time.monotonic()
    step_at_signal = read_last_step(folder / "run")
    exit_code = process.wait(600)
    exit_s = time.monotonic() - signal_time_s
    checkpoints = list_checkpoints(find_run_folder(folder) / "checkpoints")
    last_step = read_last_step(folder / "run")
    finish(start(name, kind, folder, {}, "--resume=auto"))
    if step_at_signal > 0 and step_at_signal == read_last_step(folder / "run"):
        return None
    weights = kind.load_weights(folder / "run")
    return Stop(
        kind=name,
        signal=stop_signal.name,
        signal_s=signal_s,
        exit_code=exit_code,
        exit_s=exit_s,
        last_step=last_step,
        saved_step=parse_checkpoint_step(checkpoints[-1]) if checkpoints else 0,
        is_exact=weights.keys() == expected_weights.keys()
        and all(torch.equal(weights[key], expected_weights[key]) for key in weights),
    )


def read_last_step(run_folder: Path) -> int:
    """Return the last step that a run recorded; 0 if there is none.

    Reward models record no steps, so none of their runs is discarded.
    """
    rows = read_metrics(run_folder)
    return max((row.step for row in rows if row.kind == "train"), default=0)


def start(
    name: str, kind: Kind, folder: Path, environment: Mapping[str, str], *flags: str
) -> subprocess.Popen[bytes]:
    """Start the trainer in `folder`, with its output in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = ["output=run"] if name == "reward_model" else ["output_dir=.", "name=run"]
    config = kind.config
    if config is None:
        config = folder / "config.json"
        settings = dict(setting.split("=", 1) for setting in kind.settings)
        config.write_text(json.dumps({key: parse(text) for key, text in settings.items()}))
    overrides = [*outputs, *(kind.settings if kind.config else ())]
    arguments = [argument for setting in overrides for argument in ("--set", setting)]
    module_paths = [str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "ludus.trainer", "train"),
                *("--config", str(config), *arguments, *flags),
            ],
            cwd=folder,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(module_paths)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def parse(text: str) -> str | int:
    """Return a setting as a number, if it is one."""
    return int(text) if text.isdigit() else text


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a run to end successfully."""
    if process.wait(3600) != 0:
        raise SystemExit(f"a run failed with exit code {process.returncode}")


def find_run_folder(folder: Path) -> Path:
    """Return the folder of the checkpoints; a reward model has its own."""
    [run_folder] = [*folder.glob("run.training"), folder / "run"][:1]
    return run_folder


def load_language_model(folder: Path) -> dict[str, Tensor]:
    """Return the policy's final weights."""
    return load_file(list_checkpoints(folder / "checkpoints")[-1] / "model/model.safetensors")


def load_network(folder: Path) -> dict[str, Tensor]:
    """Return the network's final weights."""
    path = list_checkpoints(folder / "checkpoints")[-1] / "learner/agent.pt"
    weights: dict[str, Tensor] = torch.load(path, weights_only=True)["policy"]
    return weights


def load_reward_model(folder: Path) -> dict[str, Tensor]:
    """Return the reward model's final weights."""
    return load_file(folder / "model.safetensors")


if __name__ == "__main__":
    sys.exit(main())
