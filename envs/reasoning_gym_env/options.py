"""Options of the reasoning-gym environment."""

from __future__ import annotations

from pydantic import Field

from ludus.env.options import EnvironmentOptions, JsonOption

from .text import AnswerFormat


class ReasoningGymOptions(EnvironmentOptions):
    """A generator, its difficulty and the format of answers."""

    dataset: str = "chain_sum"
    """Name of the generator, such as `countdown`."""
    config: JsonOption = Field(default_factory=dict)
    """Fields of the generator's configuration as a JSON object, for example `{"max_terms": 4}`.
    `ludus env show reasoning_gym:NAME` lists them, and each is also an option."""
    answer_format: AnswerFormat = "tags"
    """`tags` asks for the answer in `<answer>` tags; with `plain`, the response is the answer."""
    shows_solution: bool = False
    """Send a solution with the question, for the baseline `solution` and for recordings. It is
    not in the prompt, but the legal answers consist of it, so do not train with this option."""
