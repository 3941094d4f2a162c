"""Train the configuration of Forge's tutorial and check its win rates: `python bench/forge.py`.

    server <--WebSocket-- python -m ludus.trainer.compat.forge --> summary.json --> forge.json

Three seeds must win 41 % of blackjack's games and close 90 % of the gap from random to optimal play
within two minutes of training. The control, which has shuffled rewards, must not beat a policy that
ignores its cards. The tutorial's fixed policies play 10,000 games each: random must win 27.4 to
29.2 %, and the dealer's rule 39.9 to 41.8 % (the exact rates are 28.28 % and 40.88 %).

The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from learn import gap_closed, share_closed_blind, win_rate
from machine import setting

from ludus.env.serving.subprocess import LocalServer
from ludus.proto.runs import SUMMARY_FILE, Summary

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "examples" / "tutorial"
RESULTS = ROOT / "bench" / "results" / "forge.json"
SEEDS = (0, 1, 2)
CONTROL = "ludus.training.shuffle_rewards=true"
WIN_RATE, GAP, TRAINING_S = 0.41, 0.90, 120.0
NUM_GAMES = 10_000
BASELINES = {"play_random_policy": (0.274, 0.292), "play_heuristic_policy": (0.399, 0.418)}


@dataclass(frozen=True, slots=True)
class Trained:
    """Results of one run."""

    case: str
    seed: int
    win_rate: float
    win_rate_ci95: tuple[float, float]
    gap_closed: float
    gap_closed_ci95: tuple[float, float]
    training_s: float
    total_s: float
    num_games_trained: int
    num_games_judged: int
    load_average: float
    """Load average of the machine in the minute before the run."""
    target: str
    passed: bool


def main() -> int:
    """Return the exit code: 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--only", choices=("trained", "control", "baselines"))
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {"command": "python bench/forge.py", **setting()}
    with LocalServer("openspiel_env", {"game": "blackjack"}) as server:
        assert server.addresses is not None
        address = server.addresses.http
        if args.only in (None, "baselines"):
            results["baselines"] = _baselines(address)
            _write(results)
        cases = [("trained", seed) for seed in args.seeds] if args.only != "control" else []
        cases += [("control", 0)] if args.only in (None, "control") else []
        for case, seed in cases if args.only != "baselines" else []:
            row = asdict(_train(case, seed, address))
            print(json.dumps(row), flush=True)
            other_rows = [
                r for r in results.get("runs", []) if (r["case"], r["seed"]) != (case, seed)
            ]
            results["runs"] = sorted([*other_rows, row], key=lambda r: (r["case"], r["seed"]))
            _write(results)
    rows = [*results.get("runs", []), *results.get("baselines", [])]
    return 0 if all(row["passed"] for row in rows) else 1


def _train(case: str, seed: int, address: str) -> Trained:
    load_average = os.getloadavg()[0]
    name = f"forge-{case}-{seed}"
    overrides = [
        f"blackjack_env.server_url={address}",
        f"ludus.name={name}",
        f"ludus.output_dir={ROOT / 'runs'}",
        f"ludus.seed={seed}",
        *([CONTROL] if case == "control" else []),
    ]
    module = [sys.executable, "-m", "ludus.trainer.compat.forge", "--overwrite"]
    command = [*module, "--config", str(TUTORIAL / "blackjack.yaml"), *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    summary = Summary.model_validate_json((ROOT / "runs" / name / SUMMARY_FILE).read_bytes())
    result = summary.results["blackjack"]
    won, won_ci95 = win_rate(result.report)
    closed, closed_ci95 = gap_closed(result.report)
    if case == "control":
        blind = share_closed_blind(result)
        target, passed = f"a gap not above {blind:.3f}", closed_ci95[0] < blind
    else:
        target = f"wins {WIN_RATE}, gap {GAP}, in {TRAINING_S:.0f} s"
        in_time = summary.wall_seconds_training <= TRAINING_S
        passed = won >= WIN_RATE and closed >= GAP and in_time
    return Trained(
        case=case,
        seed=seed,
        win_rate=won,
        win_rate_ci95=won_ci95,
        gap_closed=closed,
        gap_closed_ci95=closed_ci95,
        training_s=summary.wall_seconds_training,
        total_s=summary.wall_seconds_total,
        num_games_trained=summary.games_trained,
        num_games_judged=result.report.policy.num_games,
        load_average=load_average,
        target=target,
        passed=passed,
    )


def _baselines(address: str) -> list[dict[str, object]]:
    sys.path.insert(0, str(TUTORIAL))
    import grpo_utils

    rows: list[dict[str, object]] = []
    for name, (lowest, highest) in BASELINES.items():
        stats = getattr(grpo_utils, name)(address, num_games=NUM_GAMES)
        counted = stats["wins"] + stats["losses"] + stats["pushes"]
        passed = lowest <= stats["win_rate"] <= highest and counted == NUM_GAMES
        target = f"{lowest} to {highest} of {NUM_GAMES} games"
        rows.append({"policy": name, **stats, "target": target, "passed": passed})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _write(results: dict[str, object]) -> None:
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
