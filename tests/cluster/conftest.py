"""The long forms, which `make cluster-test ARGS=--all` adds: tests marked `long`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --all."""
    parser.addoption("--all", action="store_true", help="run the long forms of cluster tests, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long forms unless they were asked for."""
    if not config.getoption("--all", default=False):
        reason = "a long form; `make cluster-test ARGS=--all`"
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason=reason))
