"""The server program: `python -m uno_env.server.app --port 8010`. `--help` lists its options."""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import UnoOptions
from .uno_environment import UnoEnvironment

_application = ServerApplication(UnoEnvironment, UnoOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
