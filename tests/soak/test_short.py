"""A short soak runs every part, and thirty faults find no problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak import report
from tests.soak.options import SoakOptions
from tests.soak.report import Verdict
from tests.soak.soak import Soak

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


async def test_short_soak_with_many_faults_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A short soak mostly waits for lingering sessions to end.
    options = SoakOptions(
        minutes=0.25,
        sessions=60,
        seed=3,
        faults_per_s=2.0,
        warm_up_opens=0,
        linger_s=20.0,
        idle_timeout_s=30.0,
    )
    soak = Soak(options, print)
    try:
        await soak.run()
    finally:
        await soak.fleet.kill_all()
        soak.fleet.remove()
    assert Verdict(soak).has_passed, "\n".join(Verdict(soak).make_lines())
    assert soak.counts["came to their end"] > 20
    assert len(soak.record.faults) >= 20

    # The lifetimes are too short for a verdict, but the check must work.
    monkeypatch.setattr(report, "MIN_SAMPLES", 12)
    verdict = Verdict(soak)
    verdict.write(tmp_path / "soak.json")
    result = json.loads((tmp_path / "soak.json").read_text())
    assert {"inline-kept", "gateway-kept", "grpc-kept"} <= {
        name.partition(" ")[0] for name in result["memory_per_hour"]
    }
    assert len(result["faults"]) == len(soak.record.faults)
