"""What travels between a server of prompts and its players."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ludus.env import Action, Observation, State

Split = Literal["train", "test"]


class PromptsAction(Action):
    """An answer: any text."""

    text: str


class PromptMessage(BaseModel):
    """One message of a prompt."""

    role: str
    content: str


class PromptsObservation(Observation):
    """What is asked."""

    messages: list[PromptMessage]
    """The prompt; after a wrong answer that may be given again, what is said of it."""


class PromptsState(State):
    """Where the episode stands; players do not see it."""

    split: Split = "train"
    row: int = -1
    """Of the data set, from 0; -1 before the first reset."""
