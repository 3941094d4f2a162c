"""Names of the options for existing runs in advice: those of Python or of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_names = {"resume": "resume='always'", "overwrite": "overwrite=True"}
"""Text of each option; these are the arguments of `ludus.trainer.Trainer`."""


def name_option(option: str) -> str:
    """Return the text by which the user of this process sets an option."""
    return _names[option]


@contextmanager
def use_option_names(*, resume: str, overwrite: str) -> Iterator[None]:
    """Use other texts within the block, for another way to start runs."""
    previous_names = dict(_names)
    _names.update(resume=resume, overwrite=overwrite)
    try:
        yield
    finally:
        _names.update(previous_names)
