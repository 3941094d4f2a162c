"""Thoughts in the text of a completion, between marks that differ between models.

    <think>The dealer shows 10.</think>HIT
    <|channel|>analysis<|message|>The dealer shows 10.<|end|><|start|>assistant
        <|channel|>final<|message|>HIT

A thought without an end fills the rest of the text. Some templates open the thought in the prompt,
so that the completion starts inside it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """The marks of a model's thoughts."""

    start: str = "<think>"
    end: str = "</think>"
    answer_start: str = ""
    """Text between a completion's thoughts and its answer, also if there are no thoughts."""
    is_open: bool = False
    """True if the prompt ends with the start of a thought."""
    field: str | None = None
    """Field of a message from which the template shows thoughts; None if there is none."""

    def get_answer(self, text: str) -> str:
        """Return a completion without its thoughts; empty if the thoughts do not end."""
        return self.split(text)[1]

    def split(self, text: str) -> tuple[str, str]:
        """Split a completion into its thoughts, without their marks, and its answer."""
        start = self.find_end(text)
        if start == 0:
            return "", text
        thoughts, answer = text[:start], text[start:]
        if self.answer_start and thoughts.endswith(self.answer_start):
            thoughts = thoughts.removesuffix(self.answer_start)
            if not thoughts:
                return "", answer
        thoughts = thoughts.replace(self.start, "").replace(self.end, "")
        return thoughts.strip(), answer.strip()

    def find_end(self, text: str) -> int:
        """Return the index at which the answer starts; the length of the text if there is none."""
        index = text.rfind(self.end)
        if index >= 0:
            index += len(self.end)
            if self.start and self.start in text[index:]:
                return len(text)  # Another thought follows, and has no end.
        elif self.is_open or (self.start and self.start in text):
            return len(text)
        else:
            index = 0
        if self.answer_start and text.startswith(self.answer_start, index):
            index += len(self.answer_start)
        return index


THINK = ThoughtForm()
"""Form of most models."""
KNOWN_FORMS = (
    THINK,
    ThoughtForm("<|channel>thought", "<channel|>"),
    ThoughtForm("[THINK]", "[/THINK]"),
    ThoughtForm("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Forms of templates that have no field for thoughts."""
