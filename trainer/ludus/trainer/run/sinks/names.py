"""How a row's values are called where a sink wants one name for each."""

from __future__ import annotations

from collections.abc import Mapping

from ludus.proto.runs import MetricsRow


def tagged_values(row: MetricsRow) -> Mapping[str, float]:
    """The row's values by tag.

    train/loss                     of the whole run, a delivery of weights included
    train/blackjack/win_rate       of one environment
    eval/blackjack/win_rate        of the trained policy
    eval/blackjack/random/win_rate of a fixed policy
    """
    place = "eval" if row.kind in ("eval", "baseline") else "train"
    parts = (place, row.environment, row.policy)
    prefix = "/".join(part for part in parts if part is not None)
    return {f"{prefix}/{name}": value for name, value in row.values.items()}
