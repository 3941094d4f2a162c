"""The server program: `python -m prompts_env.server.app --port 8006`.

`--help` lists its options.
"""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import PromptsOptions
from .prompts_environment import PromptsEnvironment

_application = ServerApplication(PromptsEnvironment, PromptsOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
