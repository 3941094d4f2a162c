"""Training through `ludus submit` and KubeRay, on a release of values-cpu.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.installed import CHART, TIMEOUT_S, installed, until, why_not
from tests.cluster.training import ROLES, submitted

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def test_a_submitted_run_learns_blackjack_on_several_nodes(tmp_path: Path) -> None:
    with (
        installed([CHART / "values-cpu.yaml"]) as release,
        submitted(release, tmp_path / "results") as training,
    ):
        until(lambda: set(training.pods()) == set(ROLES), "head, learner, rollout", TIMEOUT_S)
        assert training.node_of("learner") != training.node_of("rollout")
        training.go_on()
        summary = training.finish()
    assert summary.gap_closed is not None and summary.gap_closed >= 0.90
    assert (summary.canary_failures, summary.episodes_lost) == (0, 0)
