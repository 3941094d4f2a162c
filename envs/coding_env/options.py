"""Options of the coding environment."""

from __future__ import annotations

from pydantic import Field, field_validator

from ludus.env.options import EnvironmentOptions
from ludus.proto.errors import did_you_mean

from .problems import DEFAULT_KINDS, KINDS


class CodingOptions(EnvironmentOptions):
    """Tasks, tests and the limits of a program."""

    max_turns: int = Field(3, ge=1, le=100)
    """Maximum number of programs in an episode."""
    num_tests: int = Field(8, ge=1, le=100)
    """Number of calls that test a program."""
    num_shown: int = Field(2, ge=0, le=100)
    """Number of test calls that the prompt shows."""
    time_limit_s: int = Field(2, ge=1, le=600)
    """CPU time limit of a program with all its tests, in seconds. The wall-clock limit is three
    times as long."""
    memory_mb: int = Field(512, ge=128, le=65536)
    """Address space of a program in MiB, including Python."""
    output_kb: int = Field(16, ge=1, le=1024)
    """Maximum size of stdout, and of stderr, in KiB. The rest is dropped."""
    kinds: tuple[str, ...] = Field(DEFAULT_KINDS, strict=False, min_length=1)
    """Kinds of tasks to draw from."""

    @field_validator("kinds")
    @classmethod
    def _check_kinds(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        for kind in kinds:
            if kind not in KINDS:
                hint = did_you_mean(kind, KINDS) or f"use {', '.join(KINDS)}"
                raise ValueError(f"unknown kind {kind!r}; {hint}")
        return kinds
