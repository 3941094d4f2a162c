"""Control of the entropy bonus by the policy's entropy: `algorithm.entropy_control`."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from ludus.proto.config import EntropyControl


class EntropyState(BaseModel):
    """State of the entropy bonus between two training steps.

    The coefficient rises by a fixed change after each step whose entropy is at or below the
    target, and falls otherwise. It is applied only while the entropy is at or below the target
    (Skywork-OR1, arXiv:2505.22312, section 4).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    coef: float
    """Coefficient of the next step, if it is applied."""
    entropy: float = math.inf
    """Entropy of the last step, in nats per sampled token; infinite before the first step."""

    def choose_coef(self, control: EntropyControl) -> float:
        """Return the coefficient of the next step."""
        return self.coef if self.entropy <= control.target else 0.0

    def observe(self, control: EntropyControl, entropy: float) -> EntropyState:
        """Return the state after a step; an entropy that is not finite changes nothing."""
        if not math.isfinite(entropy):
            return self
        change = control.change if entropy <= control.target else -control.change
        coef = min(max(self.coef + change, control.min_coef), control.max_coef)
        return EntropyState(coef=coef, entropy=entropy)
