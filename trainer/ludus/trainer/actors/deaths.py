"""Why an actor, or a call to one, came to its end, in words for people."""

from __future__ import annotations

import ray


def reason_of(error: BaseException) -> str:
    """In one line, without tracebacks and the advice that Ray gives for every death."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return " ".join(str(error).split()).partition(" Some common causes include")[0]
