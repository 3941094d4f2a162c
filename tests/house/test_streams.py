"""Random generators of the trainer, which only core/streams.py may create or seed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TRAINER_FOLDER = Path(__file__).parents[2] / "trainer"
STREAMS_PATH = TRAINER_FOLDER / "ludus" / "trainer" / "core" / "streams.py"
SEEDING_CALLS = {
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
"""Names of seeding calls, with the module only if Ludus has a different call of that name."""


def find_seeding_calls(text: str) -> list[str]:
    """Return the names of the calls that create or seed a random generator."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = map(ast.unparse, calls)
    return [
        name for name in names if name in SEEDING_CALLS or name.rpartition(".")[2] in SEEDING_CALLS
    ]


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
    assert find_seeding_calls(f"draw = {call}")


def test_similar_names_are_not_seeding_calls() -> None:
    assert (
        find_seeding_calls(
            "Generator(engine)\nrandom_of(0, Stream.ANSWER)\nderive_training_seed(1, 2, 3)"
        )
        == []
    )


@pytest.mark.slow
def test_the_trainer_seeds_generators_in_one_module() -> None:
    calls_by_path = {
        path: find_seeding_calls(path.read_text(encoding="utf-8"))
        for path in TRAINER_FOLDER.rglob("*.py")
    }
    assert sorted(calls_by_path.pop(STREAMS_PATH)) == [
        "np.random.SeedSequence",
        "random.Random",
        "torch.default_generator.manual_seed",
        "torch.manual_seed",
    ]
    assert {path: names for path, names in calls_by_path.items() if names} == {}
