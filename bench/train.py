"""Measure the training plane: `make bench-train`.

    overlap.py    two loops compared with one      learner.py   a step compared with a bare loop
    weights.py    weights compared with a copy     speedup.py   seconds to 41 % compared with TRL

The parts run one after the other in separate processes and print their samples as JSON. The samples
go to bench/results/train.json, with the machine and summary ratios. The other parts keep the
results of earlier calls on the same machine with the same packages:

    python bench/train.py [--only overlap learner weights speedup speedup_vllm]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import setting

BENCH = Path(__file__).parent
RESULTS = BENCH / "results" / "train.json"
PARTS: dict[str, tuple[str, ...]] = {
    "learner": ("learner.py",),
    "weights": ("weights.py",),
    "overlap": ("overlap.py",),
    "speedup": ("speedup.py",),
    "speedup_vllm": ("speedup.py", "--without-trl", "--set", "generator.kind=vllm"),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """One summary number of a part."""

    part: str
    target: str
    value: float


def compute_ratios(parts: dict[str, Any]) -> dict[str, Ratio]:
    """Return the ratios of the measured parts; of several cases, the worst counts."""
    ratios: dict[str, Ratio] = {}
    if overlap := parts.get("overlap"):
        real, simulated = overlap["real"], overlap["simulation"][overlap["headline"]]
        for name, at_least in (("efficiency", True), ("slower_side_idle_fraction", False)):
            choose, target = (min, ">= 0.90") if at_least else (max, "<= 0.05")
            key = "overlap_efficiency" if at_least else name
            ratios[key] = Ratio("overlap", target, choose(real[name], simulated[name]))
        for name, target in (
            ("trained_over_generated_tokens", ">= 0.95"),
            ("sampler_pause_fraction", "<= 0.02"),
        ):
            ratios[name] = Ratio("overlap", target, real[name])
    if learner := parts.get("learner"):
        worst = min(row["ratio"] for row in learner["learner_vs_bare_loop"])
        ratios["learner_vs_bare_loop"] = Ratio("learner", ">= 0.95", worst)
    if speedup := parts.get("speedup"):
        ratios["speedup_vs_trl_to_041"] = Ratio("speedup", ">= 2", speedup["speedup"])
        if vllm := parts.get("speedup_vllm"):
            seconds = vllm["median_seconds"]["ludus"] or math.inf
            value = speedup["median_seconds"]["trl"] / seconds
            ratios["speedup_vs_trl_to_041_with_vllm"] = Ratio("speedup_vllm", "stated", value)
    if weights := parts.get("weights"):
        for name, store in weights["stores"].items():
            ratios[f"{name}_store_rate_over_copy"] = Ratio(
                "weights", "stated", store["rate_over_copy"]
            )
        for name, delta in weights["deltas"].items():
            ratios[f"delta_over_full_{name}"] = Ratio("weights", "stated", delta["delta_over_full"])
    return ratios


def main() -> None:
    """Measure, print the ratios and save every sample."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    chosen = parser.parse_args().only
    saved = _earlier()
    for name in chosen:
        saved["parts"][name] = {"load_average": os.getloadavg()[0], **_measure(name)}
        ratios = compute_ratios(saved["parts"])
        saved["ratios"] = {key: ratio.value for key, ratio in ratios.items()}
        RESULTS.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
        for key, ratio in ratios.items():
            if ratio.part == name:
                print(f"{key:<40}{ratio.value:9.4f}  wanted {ratio.target}", flush=True)


def _measure(name: str) -> dict[str, Any]:
    print(f"{name}: {' '.join(PARTS[name])}", flush=True)
    program, *arguments = PARTS[name]
    process = subprocess.run(
        [sys.executable, str(BENCH / program), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def _earlier() -> dict[str, Any]:
    """Return the results of earlier calls with the same machine and packages."""
    now = {"command": "make bench-train", **setting()}
    if RESULTS.exists():
        earlier = json.loads(RESULTS.read_text(encoding="utf-8"))
        if all(earlier.get(key) == value for key, value in now.items()):
            return earlier
    return {**now, "ratios": {}, "parts": {}}


if __name__ == "__main__":
    main()
