"""The trainer draws random numbers only from the streams of a run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "trainer"
STREAMS = TRAINER / "ludus" / "trainer" / "core" / "streams.py"
SEEDERS = {
    "Random",
    "RandomState",
    "SeedSequence",
    "default_rng",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "set_seed",
    "torch.Generator",
}
"""Last names of seeding calls; a full name if Ludus has a different call with the last name."""


def find_seedings(text: str) -> list[str]:
    """Return the calls that create or seed a generator."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = map(ast.unparse, calls)
    return [name for name in names if name in SEEDERS or name.rpartition(".")[2] in SEEDERS]


@pytest.mark.parametrize(
    "call",
    [
        "random.Random(seed)",
        "Random(3)",
        "torch.manual_seed(run.seed)",
        "torch.cuda.manual_seed_all(1)",
        "np.random.default_rng(0)",
        "np.random.seed(0)",
        "torch.Generator().manual_seed(2)",
        "torch.Generator(device='cpu')",
    ],
)
def test_a_seeding_call_is_detected(call: str) -> None:
    assert find_seedings(f"draw = {call}")


def test_similar_names_are_not_seeding_calls() -> None:
    assert (
        find_seedings(
            "Generator(engine)\nrandom_of(0, Stream.ANSWER)\nderive_training_seed(1, 2, 3)"
        )
        == []
    )


def test_the_trainer_seeds_generators_in_one_module() -> None:
    calls_by_path = {
        path: find_seedings(path.read_text(encoding="utf-8")) for path in TRAINER.rglob("*.py")
    }
    assert sorted(calls_by_path.pop(STREAMS)) == [
        "np.random.SeedSequence",
        "random.Random",
        "torch.default_generator.manual_seed",
        "torch.manual_seed",
    ]
    assert {path: names for path, names in calls_by_path.items() if names} == {}
