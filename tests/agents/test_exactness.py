"""Training tokens of agents equal the tokens that a real engine sampled over HTTP.

bench/agents.py plays more episodes.
"""

from __future__ import annotations

import pytest

from tests.agents.exactness import measure


@pytest.mark.slow
async def test_training_tokens_equal_tokens_sampled_over_http() -> None:
    measurement = await measure(num_episodes=12)
    assert measurement.num_episodes == 12
    assert measurement.num_branches > 5 and measurement.num_calls > 5
    assert measurement.largest_logprob_error < 1e-4
