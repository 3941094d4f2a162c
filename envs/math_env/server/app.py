"""The server program: `python -m math_env.server.app --port 8005`. `--help` lists its options."""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import MathOptions
from .math_environment import MathEnvironment

_application = ServerApplication(MathEnvironment, MathOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
