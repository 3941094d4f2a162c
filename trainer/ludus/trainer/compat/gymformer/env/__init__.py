"""Gymformer's language environments. The import registers them without loading any model."""

from __future__ import annotations

import gymnasium

_PACKAGE = __name__

gymnasium.register(
    id="RLHFEnv-v0",
    entry_point=f"{_PACKAGE}.rlhf_env:RLHFEnv",
    kwargs={"reward_model": "models/reward_model", "dataset": "data/descriptiveness_offline_5k"},
)
gymnasium.register(id="CoTEnv-v0", entry_point=f"{_PACKAGE}.cot_env:CoTEnv")
gymnasium.register(
    id="SummarizationEnv-v0", entry_point=f"{_PACKAGE}.summarization_env:SummarizationEnv"
)
