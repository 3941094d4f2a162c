"""The server program: `python -m coding_env.server.app --port 8008`. `--help` lists its options."""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import CodingOptions
from .coding_environment import CodingEnvironment

_application = ServerApplication(CodingEnvironment, CodingOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
