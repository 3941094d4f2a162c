"""The results of the examples are those of the learning proofs."""

from example_results import RESULTS, make_results


def test_results_of_the_examples_are_current() -> None:
    assert RESULTS.read_text(encoding="utf-8") == make_results(), "run dev/example_results.py"
