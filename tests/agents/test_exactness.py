"""What a real engine samples for agents over HTTP is what is trained; bench/agents.py has more."""

from __future__ import annotations

import pytest

from tests.agents.exactness import measure


@pytest.mark.slow
async def test_what_the_engine_samples_over_http_is_what_is_trained() -> None:
    found = await measure(num_episodes=12)
    assert found.num_episodes == 12
    assert found.num_branches > 5 and found.num_calls > 5
    assert found.largest_logprob_error < 1e-4
