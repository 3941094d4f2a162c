"""The interpreter of TRL, in the same virtual environment as that of the conformance tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "dev"))

from upstream_environment import build_virtual_environment  # noqa: E402

_NAME = "upstream-trl-1.16.0+openenv-0.10.0"
_PACKAGES = ["trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "accelerate==1.15.0"]
_OTHER_PACKAGES = ["datasets", "openenv==0.10.0", "jmespath"]


def find_trl_python() -> Path:
    """Return the interpreter; the environment is built if it does not exist."""
    return build_virtual_environment(_NAME, [*_PACKAGES, *_OTHER_PACKAGES])
