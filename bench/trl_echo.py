"""Train TRL's echo script, whose rollout function differs from TRL's only in its URL.

    examples/trl/echo_here.py, seed --> metrics.jsonl --> seconds to 90 % of the highest reward

The highest reward is 32 times the longest token of the model's vocabulary, at 0.1 per character.
The control has shuffled rewards and must not reach 90 %. The results also report whether the mean
of the control's last quarter is in the 95 % interval of the initial policy's reward, from its first
batch. Rows of earlier calls on the same machine with the same packages are kept:

    python bench/trl_echo.py [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import machine, read_earlier_runs, write_runs

from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import read_metrics
from ludus.trainer.models.load import load_tokenizer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "trl_echo.json"
NUM_TOKENS = 32
SHARE = 0.9
MAX_SECONDS = 60.0
BATCH = 32


def compute_highest_reward(run: Path) -> float:
    """Return the highest reward that a completion of the run can have."""
    tokenizer = load_tokenizer(str(run / "initial_model"))
    texts = tokenizer.batch_decode([[n] for n in range(len(tokenizer))], skip_special_tokens=True)
    return 0.1 * NUM_TOKENS * max(map(len, texts))


def measure(seed: int, *, shuffled: bool) -> dict[str, Any]:
    """Train one run; return its results and whether it passed."""
    run = ROOT / "runs" / f"trl-echo-{seed}{'-shuffled' if shuffled else ''}"
    load_average = os.getloadavg()[0]
    command = [sys.executable, ROOT / "examples" / "trl" / "echo_here.py", "--seed", str(seed)]
    options = ["--output-dir", run, "--port", "0", *(["--shuffle-rewards"] if shuffled else [])]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    rows = [row for row in read_metrics(run) if row.kind == "train"]
    rewards = [row.values[TrainMetric.REWARD_MEAN] for row in rows]
    target_reward = SHARE * compute_highest_reward(run)
    reached = [row for row, reward in zip(rows, rewards, strict=True) if reward >= target_reward]
    error = 1.96 * rows[0].values[TrainMetric.REWARD_STD] / math.sqrt(BATCH)
    start = (rewards[0] - error, rewards[0] + error)
    last = rewards[-len(rewards) // 4 :]
    end = sum(last) / len(last)
    seconds = reached[0].elapsed_s if reached else None
    is_fast = seconds is not None and seconds <= MAX_SECONDS
    passed = not reached if shuffled else is_fast
    return {
        "seed": seed,
        "shuffled": shuffled,
        "most": compute_highest_reward(run),
        "wanted": target_reward,
        "step": reached[0].step if reached else None,
        "seconds": seconds,
        "start_ci95": start,
        "end": end,
        "ends_where_it_began": start[0] <= end <= start[1],
        "rewards": rewards,
        "load_average": load_average,
        "machine": machine(),
        "passed": passed,
    }


def main() -> int:
    """Return the exit code: 1 if a run of this call failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=["learns", "shuffled"])
    args = parser.parse_args()
    rows = {(row["seed"], row["shuffled"]): row for row in read_earlier_runs(RESULTS)}
    passed = True
    for seed in args.seeds:
        for shuffled in (False, True):
            if args.only == ("learns" if shuffled else "shuffled"):
                continue
            rows[seed, shuffled] = row = measure(seed, shuffled=shuffled)
            passed &= row["passed"]
            print(json.dumps({k: v for k, v in row.items() if k != "rewards"}), flush=True)
            write_runs(RESULTS, "make learn-trl", [rows[key] for key in sorted(rows)])
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
