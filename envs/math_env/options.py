"""Options of the arithmetic environment."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ludus.env.options import EnvironmentOptions

from .arithmetic import OPERATIONS
from .models import Operation

_MAX_ANSWERS = 10_000
"""Maximum number of possible answers. Every observation lists them all."""


class MathOptions(EnvironmentOptions):
    """Difficulty of the exercises."""

    operation: Operation = "add"
    """`add`, `subtract` (the larger number comes first) or `multiply`."""
    limit: int = Field(20, ge=2)
    """Upper bound of both numbers, exclusive. A larger limit is harder."""

    @model_validator(mode="after")
    def _check_num_answers(self) -> Self:
        if self.num_answers > _MAX_ANSWERS:
            raise ValueError(
                f"limit must allow at most {_MAX_ANSWERS:,} possible answers, got {self.limit},"
                f" which allows {self.num_answers:,} with {self.operation!r}; reduce the limit"
            )
        return self

    @property
    def num_answers(self) -> int:
        """Number of possible answers, from 0 to the largest solution."""
        return OPERATIONS[self.operation].compute_max_solution(self.limit) + 1
