"""The server program: `python -m echo_env.server.app --port 8000`. `--help` lists its options."""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import EchoOptions
from .echo_environment import EchoEnvironment

_application = ServerApplication(EchoEnvironment, EchoOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
