"""The server program: `python -m reasoning_gym_env.server.app --dataset gcd --port 8011`.

`--help` lists its options.
"""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import ReasoningGymOptions
from .reasoning_gym_environment import ReasoningGymEnvironment

_application = ServerApplication(ReasoningGymEnvironment, ReasoningGymOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
