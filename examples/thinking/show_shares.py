"""Show the shares of right answers and of thoughts of each model in a JSON file of `ludus eval`.

    SmolLM2-sft   right after a thought 0.285 (0.243 to 0.331)   thought 0.990 (0.975 to 0.996)

An answer is right if the environment reports a success. A thought is one <think>...</think> with
text in it and after it. The intervals are Wilson's, with 95 %.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ludus.env.evaluation import wilson_interval
from prompts_env.rules import has_thought

Outcome = tuple[bool, bool]
"""True for a right answer after a thought, and True for a thought."""


def read_outcomes(path: Path) -> dict[str, list[Outcome]]:
    """Return the outcomes of all episodes, by model."""
    outcomes = defaultdict(list)
    for episode in json.loads(path.read_text(encoding="utf-8"))["episodes"]:
        if episode["turns"]:  # episodes of fixed policies have no turns
            has_format = has_thought([episode["turns"][-1]["answer"]]) == [1.0]
            outcomes[episode["policy"]].append((has_format and episode["success"], has_format))
    return dict(outcomes)


def format_share(outcomes: Sequence[bool]) -> str:
    """Return a share and its interval as text."""
    low, high = wilson_interval(sum(outcomes), len(outcomes))
    return f"{sum(outcomes) / len(outcomes):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Show a line for each model."""
    for model, outcomes in read_outcomes(Path(sys.argv[1])).items():
        right, thoughts = zip(*outcomes, strict=True)
        print(f"{model}   right after a thought {format_share(right)}", end="   ")
        print(f"thought {format_share(thoughts)}")


if __name__ == "__main__":
    main()
