"""Conversion of failed writes into errors that a user understands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from ludus.proto.errors import CheckpointError
from ludus.trainer.core.output import describe_write_error


def find_first_failure(error: BaseException) -> BaseException:
    """Return the first failure of any rank that `error` lists, or `error` itself."""
    failures = getattr(error, "failures", {})
    return next((failure[0] for failure in failures.values()), error)


@contextmanager
def convert_write_errors(folder: Path) -> Iterator[None]:
    """Raise a CheckpointError that names the folder and the reason if a write fails.

    Writers in Rust raise their own exception classes. A RuntimeError of torch.distributed means
    that the ranks lost contact, so it passes unchanged.
    """
    try:
        yield
    except RuntimeError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{describe_write_error(folder, find_first_failure(error))}; free some space, and "
            "check that every node can write there"
        ) from error
