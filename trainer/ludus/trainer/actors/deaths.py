"""What Ray says of an actor's death, in words for people."""

from __future__ import annotations

import ray


def reason_of(error: ray.exceptions.RayError) -> str:
    """Why an actor died, in one line and without the advice that Ray gives for every death."""
    return " ".join(str(error).split()).partition(" Some common causes include")[0]
