"""Write examples/results.json from the results of the learning proofs: dev/example_results.py.

    bench/results/{learn,classic,learn_real}.json --> one row per example and environment

`ludus env show` prints these rows. Controls, such as runs with shuffled rewards, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "examples" / "results.json"
_BENCH_RESULTS = ROOT / "bench" / "results"
_REAL_EXAMPLES = {"sums": "math/smollm2.toml"}
"""Examples of `bench/learn_real.py`, by case, whose result is a share of successes."""

Row = dict[str, Any]


def make_results() -> str:
    """Return the text of the file."""
    rows: dict[tuple[str, str], Row] = {}
    for example, environment, metric, run, value, target in _list_runs():
        row = rows.setdefault(
            (example, environment),
            {
                "example": example,
                "environment": environment,
                "metric": metric,
                "values": [],
                "target": target,
                "training_s": [],
                "command": run["command"],
            },
        )
        row["values"].append(float(f"{value:.4g}"))
        row["training_s"].append(round(run["training_s"], 1))
    return json.dumps(list(rows.values()), indent=2) + "\n"


def _list_runs() -> Iterator[tuple[str, str, str, Row, float, str]]:
    """Yield the example, environment, metric, run, value and target of each measured run."""
    for run in _read("learn.json", "make learn-examples"):
        if run["value"] is not None and not run["made_of"]["overrides"]:
            example = run["made_of"]["example"].removeprefix("examples/")
            environment = run["environment"] if _is_named(example) else ""
            yield example, environment, run["metric"], run, run["value"], run["target"]
    for run in _read("classic.json", "make learn-classic"):
        example = f"{run['part']}/ppo.toml"
        if run["trainer"] == "ludus" and (ROOT / "examples" / example).is_file():
            yield example, "", "mean_return", run, run["mean_return"], run["target"]
    for run in _read("learn_real.json", "make learn-real"):
        example = _REAL_EXAMPLES.get(run["case"])
        if example is not None:
            target = next(target for target in run["targets"] if target.endswith(" after"))
            value = run["shares"]["after"]["value"]
            yield example, "", "win_rate", run, value, target.removesuffix(" after")


def _is_named(example: str) -> bool:
    """Return True if an example has a table of named environments."""
    return "[environments." in (ROOT / "examples" / example).read_text(encoding="utf-8")


def _read(file_name: str, command: str) -> list[Row]:
    document = json.loads((_BENCH_RESULTS / file_name).read_text(encoding="utf-8"))
    return [{**run, "command": command} for run in document["runs"]]


if __name__ == "__main__":
    RESULTS.write_text(make_results(), encoding="utf-8")
