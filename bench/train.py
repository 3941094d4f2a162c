"""The training plane in numbers: `make bench-train`.

    overlap.py    two loops against one           learner.py   a step against a bare loop
    weights.py    versions against a plain copy   speedup.py   seconds to 41 % against TRL's

Each part runs in a process of its own, one after the other, and prints its samples as JSON;
everything is saved to bench/results/train.json, with the machine and the ratios that sum it up.
Parts that are not asked for stay as an earlier call measured them on the same machine with the
same packages:

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
    """One number that sums a part up."""

    part: str
    wanted: str
    value: float


def ratios_of(parts: dict[str, Any]) -> dict[str, Ratio]:
    """What the parts that were measured come to, worst case first where there are several."""
    found: dict[str, Ratio] = {}
    if overlap := parts.get("overlap"):
        real, simulated = overlap["real"], overlap["simulation"][overlap["headline"]]
        for name, at_least in (("efficiency", True), ("slower_side_idle_fraction", False)):
            choose, wanted = (min, ">= 0.90") if at_least else (max, "<= 0.05")
            key = "overlap_efficiency" if at_least else name
            found[key] = Ratio("overlap", wanted, choose(real[name], simulated[name]))
        for name, wanted in (
            ("trained_over_generated_tokens", ">= 0.95"),
            ("sampler_pause_fraction", "<= 0.02"),
        ):
            found[name] = Ratio("overlap", wanted, real[name])
    if learner := parts.get("learner"):
        worst = min(row["ratio"] for row in learner["learner_vs_bare_loop"])
        found["learner_vs_bare_loop"] = Ratio("learner", ">= 0.95", worst)
    if speedup := parts.get("speedup"):
        found["speedup_vs_trl_to_041"] = Ratio("speedup", ">= 2", speedup["speedup"])
        if vllm := parts.get("speedup_vllm"):
            seconds = vllm["median_seconds"]["ludus"] or math.inf
            value = speedup["median_seconds"]["trl"] / seconds
            found["speedup_vs_trl_to_041_with_vllm"] = Ratio("speedup_vllm", "stated", value)
    if weights := parts.get("weights"):
        for name, store in weights["stores"].items():
            found[f"{name}_store_rate_over_copy"] = Ratio(
                "weights", "stated", store["rate_over_copy"]
            )
        for name, delta in weights["deltas"].items():
            found[f"delta_over_full_{name}"] = Ratio("weights", "stated", delta["delta_over_full"])
    return found


def main() -> None:
    """Measures, prints the ratios, and saves every sample."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    chosen = parser.parse_args().only
    saved = _earlier()
    for name in chosen:
        saved["parts"][name] = {"load_average": os.getloadavg()[0], **_measure(name)}
        ratios = ratios_of(saved["parts"])
        saved["ratios"] = {key: ratio.value for key, ratio in ratios.items()}
        RESULTS.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
        for key, ratio in ratios.items():
            if ratio.part == name:
                print(f"{key:<40}{ratio.value:9.4f}  wanted {ratio.wanted}", flush=True)


def _measure(name: str) -> dict[str, Any]:
    print(f"{name}: {' '.join(PARTS[name])}", flush=True)
    program, *arguments = PARTS[name]
    answer = subprocess.run(
        [sys.executable, str(BENCH / program), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(answer.stdout.splitlines()[-1])


def _earlier() -> dict[str, Any]:
    """What earlier calls measured, as far as machine and packages are the same."""
    now = {"command": "make bench-train", **setting()}
    if RESULTS.exists():
        earlier = json.loads(RESULTS.read_text(encoding="utf-8"))
        if all(earlier.get(key) == value for key, value in now.items()):
            return earlier
    return {**now, "ratios": {}, "parts": {}}


if __name__ == "__main__":
    main()
