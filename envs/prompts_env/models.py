"""Messages between a prompts_env server and its players."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ludus.env import Action, Observation, State

Split = Literal["train", "test"]


class PromptsAction(Action):
    """A response: any text."""

    text: str


class PromptMessage(BaseModel):
    """One message of a prompt."""

    role: str
    content: str


class PromptsObservation(Observation):
    """Messages to respond to."""

    messages: list[PromptMessage]
    """The prompt, or the retry prompt after a wrong response."""


class PromptsState(State):
    """State of the episode, hidden from players."""

    split: Split = "train"
    row: int = -1
    """Index of the row in the data set; -1 before the first reset."""
