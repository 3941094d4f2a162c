"""Short descriptions of the failures of actors and of calls to them."""

from __future__ import annotations

import ray


def describe_failure(error: BaseException) -> str:
    """Return the reason in one line, without tracebacks and Ray's general advice."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return " ".join(str(error).split()).partition(" Some common causes include")[0]
