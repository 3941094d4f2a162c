"""The server program: `python -m atari_env.server.app --game pong --port 8007`.

`--help` lists its options.
"""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import AtariOptions
from .atari_environment import AtariEnvironment

_application = ServerApplication(AtariEnvironment, AtariOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
