"""The numbers in docs/performance.md are those of the committed measurements."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
ENVIRONMENTS: dict[str, Any] = json.loads((ROOT / "bench/results/env.json").read_text())
SOAK: dict[str, Any] = json.loads((ROOT / "bench/results/soak.json").read_text())
MEMORY_ROWS = {
    "gateway": "gateway-kept",
    "server, sessions on its event loop": "inline-kept",
    "server, pool of workers": "pool-kept",
    "server, a process per session": "process-kept",
    "client, gRPC": "grpc-kept",
    "client, HTTP": "http-kept",
    "client, WebSocket": "socket-kept",
}


def read_rows(heading: str) -> dict[str, list[str]]:
    """Return the cells of a table by the first cell; `heading` starts the table's first line."""
    table = PAGE.partition(f"\n| {heading}")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    return {cells[0].strip(" `*"): [cell.strip(" *") for cell in cells[1:]] for cells in rows}


def compute_median(result: dict[str, Any], key: str) -> float:
    return statistics.median(sample[key] for sample in result["samples"])


def test_speeds_and_processor_times_are_those_of_the_benchmark() -> None:
    rows = read_rows("row | steps/s")
    base = ENVIRONMENTS["results"][0]["median_steps_per_s"]
    assert list(rows) == [result["name"] for result in ENVIRONMENTS["results"]]
    for result in ENVIRONMENTS["results"]:
        speed_text, ratio_text, times_text = rows[result["name"]]
        speed = result["median_steps_per_s"]
        assert abs(float(speed_text.replace(",", "")) / speed - 1) < 0.005
        ratio = float(ratio_text.split(";")[0])
        assert abs(ratio - speed / base) <= (0.005 if ratio < 1 else 0.051)
        times = [
            float(text.replace(",", "")) for text in times_text.removesuffix(" µs").split(", ")
        ]
        keys = ("client_us_per_step", "server_us_per_step")[: len(times)]
        for microseconds, key in zip(times, keys, strict=True):
            assert abs(microseconds - compute_median(result, key)) <= 0.51


def test_latencies_are_those_of_the_benchmark() -> None:
    singles = ENVIRONMENTS["singles"]
    grpc, socket, gateway = (
        f"{singles[f'latency_{wire}']['p50_ms']:.2f} ms"
        for wire in ("grpc", "websocket", "gateway")
    )
    assert f"takes {grpc} (median) over gRPC, {socket} over WebSocket, and {gateway}" in PAGE
    inline, process = singles["open_inline"], singles["open_process"]
    assert f"opens in {inline['p50_ms']:.0f} ms (median; {inline['p99_ms']:.0f} ms" in PAGE
    assert f"or in {process['p50_ms'] / 1000:.1f} s if each session" in PAGE
    hold = singles["hold"]
    assert f"{hold['answered']:,} of {hold['calls']:,} calls were answered" in PAGE


def test_page_says_what_the_committed_results_lack() -> None:
    names = {result["name"] for result in ENVIRONMENTS["results"]}
    missing_ratios = {"grpc_stream_together", "gateway_vs_direct"} - set(ENVIRONMENTS["ratios"])
    is_older = "gateway_stream" not in names
    assert is_older == ("The committed results are older than the row `gateway_stream`" in PAGE)
    assert len(missing_ratios) == (2 if is_older else 0)


def test_counts_are_those_of_the_soak() -> None:
    num_skipped = sum("skipped" in fault for fault in SOAK["faults"])
    rows = read_rows(
        f"{SOAK['minutes_of_faults']:.0f} minutes, {SOAK['sessions_at_once']} concurrent sessions, "
        f"{len(SOAK['faults']):,} faults, of which {num_skipped} found no target"
    )
    assert SOAK["command"] in PAGE
    assert {name: cells[0] for name, cells in rows.items()} == {
        "sessions opened": f"{SOAK['counts']['opened']:,}",
        "steps, each response verified": f"{SOAK['counts']['steps']:,}",
        "sessions that ended normally": f"{SOAK['counts']['came to their end']:,}",
        "sessions ended by a fault that affected them": f"{SOAK['num_lost']:,}",
        "sessions ended by another fault": str(len(SOAK["lost_and_not_hit"])),
        "wrong or late responses, leaked sessions or processes": str(len(SOAK["violations"])),
        "exact counts of all resources": f"{SOAK['exact_counts']} of {SOAK['exact_counts']}",
    }


def test_memory_is_that_of_the_soak() -> None:
    rows = read_rows("uninterrupted process")
    assert set(rows) == set(MEMORY_ROWS)
    memory = {name.split(" (")[0]: trends for name, trends in SOAK["memory_per_hour"].items()}
    last_mib = {
        name.split(" (")[0]: float(text.split()[-1])
        for name, text in SOAK["uss_mib_by_minute"].items()
    }
    assert len(memory) == 11 and "all eleven processes that live throughout" in PAGE
    for row, name in MEMORY_ROWS.items():
        trend = memory[name]["uss_mib"]
        mib_text, slope_text, interval_text = rows[row]
        assert float(mib_text) == last_mib[name]
        low, high = map(float, interval_text.split(" to "))
        for number, key in ((float(slope_text), "per_hour"), (low, "low"), (high, "high")):
            assert abs(number - trend[key]) <= 0.051
