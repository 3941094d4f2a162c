"""The interface of sinks, and the tags of values in a sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from ludus.env.types import JsonObject
from ludus.proto.runs import MetricsRow


class MetricsSink(ABC):
    """A destination that receives the rows of a run in chronological order."""

    name: str

    @abstractmethod
    def write(self, row: MetricsRow) -> None:
        """Write a row."""

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:  # noqa: B027
        """Receive the options of each environment, by its name."""

    def rewind(self, step: int) -> None:  # noqa: B027
        """Invalidate the rows of later steps, because the run continues from `step`."""

    def close(self) -> None:  # noqa: B027
        """Write pending rows and release resources."""


def tag_values(row: MetricsRow) -> Mapping[str, float]:
    """Return the row's values by tag.

    train/loss                      value of the whole run
    train/blackjack/win_rate        value of one environment
    eval/blackjack/win_rate         result of the trained policy
    eval/blackjack/random/win_rate  result of a fixed policy
    """
    section = "eval" if row.kind in ("eval", "baseline") else "train"
    parts = (section, row.environment, row.policy)
    prefix = "/".join(part for part in parts if part is not None)
    return {f"{prefix}/{name}": value for name, value in row.values.items()}
