"""The chat templates of well-known models render the prompts that Ludus builds."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from ludus.proto.errors import ConfigError
from ludus.trainer.models.tool_calls import ToolCall
from tests.conformance.template_families import (
    ADD_TOOL,
    PAGE,
    WRONG,
    Family,
    Judge,
    judge_family,
    load_families,
    make_page,
)

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]

MIN_FAMILIES = 100
CHARACTERS = "abzAZ09 .,:;!?+-*/%&$#@~^äß漢字🙂"
"""Characters of random texts. No form's tags consist of them alone."""


@pytest.fixture(scope="module")
def families() -> list[Family]:
    """Return the templates of all families."""
    return list(load_families())


@pytest.fixture(scope="module")
def rows(families: list[Family]) -> dict[str, dict[str, str]]:
    """Return the verdicts on all families."""
    return {family.name: judge_family(family) for family in families}


def test_every_prompt_is_the_templates_own_or_refused(rows: dict[str, dict[str, str]]) -> None:
    assert len(rows) >= MIN_FAMILIES
    wrong_cells = {
        (family, name)
        for family, row in rows.items()
        for name, cell in row.items()
        if WRONG in cell
    }
    assert not wrong_cells


def test_table_in_the_documentation_is_current(rows: dict[str, dict[str, str]]) -> None:
    assert PAGE.read_text("utf-8") == make_page(rows), (
        "write the page with: python -m tests.conformance.template_families"
    )


def test_random_calls_are_read_back_from_the_text_of_each_template(families: list[Family]) -> None:
    generator = Random("calls")
    num_round_trips = 0
    for family in families:
        try:
            judge = Judge(family, enable_thinking=False)
            judge.chat.check_tools([ADD_TOOL])
        except ConfigError:
            continue
        if not judge.renders_calls:
            continue
        for _ in range(20):
            arguments = {"word": draw_text(generator), "number": generator.randint(-999, 999)}
            text = judge.call_text(arguments["word"], 0, arguments["number"])
            calls = judge.chat.call_form.read_calls(text, [ADD_TOOL])
            assert calls == [ToolCall("find_sum", arguments)], (family.name, text)
            num_round_trips += 1
    assert num_round_trips > 500


def draw_text(generator: Random) -> Any:
    """Return a random text without white space at its ends, which templates may trim."""
    length = generator.randint(1, 20)
    return "".join(generator.choices(CHARACTERS, k=length)).strip() or "-"
