"""The checker of English and names, and its findings in the repository."""

from __future__ import annotations

import pytest
from prose import EXCEPTIONS, PythonFile, find_all, find_in_markdown


def find_broken_rules(text: str) -> set[tuple[str, str]]:
    findings = PythonFile("trainer/example.py", text).findings()
    return {(finding.rule, finding.text) for finding in findings}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('"""What a run came to."""', "opening"),
        ('x: int = 1\n"""Of the first one."""', "opening"),
        ("# Whether it runs.\nx = 1", "opening"),
        ('def load():\n    """The model."""', "verb"),
        ('raise_error("nobody has asked for it anew")', "word"),
        ("one = 1", "name"),
        ("def path_of(run): ...", "name"),
        ("def connected(): ...", "name"),
    ],
)
def test_broken_rule_is_detected(text: str, rule: str) -> None:
    assert rule in {name for name, _ in find_broken_rules(text)}


@pytest.mark.parametrize(
    "text",
    [
        '"""A running episode."""',
        'def load():\n    """Load the model and return it."""',
        '@property\ndef size(self):\n    """Number of groups."""',
        "num_groups = 1",
        "def feed(): ...",
    ],
)
def test_plain_english_passes(text: str) -> None:
    assert find_broken_rules(text) == set()


def test_code_in_markdown_is_not_checked() -> None:
    text = "Use `anew`.\n```\nnobody\n```\nNobody does.\n"
    assert [finding.line for finding in find_in_markdown("x.md", text)] == [5]


@pytest.mark.slow
def test_repository_breaks_no_prose_rule() -> None:
    findings = find_all()
    assert [str(finding) for finding in findings[:40]] == []


def test_number_of_prose_exceptions_is_limited() -> None:
    assert len(EXCEPTIONS) <= 40
