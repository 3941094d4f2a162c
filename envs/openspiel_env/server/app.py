"""The server program: `OPENSPIEL_GAME=blackjack python -m openspiel_env.server.app --port 8004`.

`--help` lists its options.
"""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import OpenSpielOptions
from .openspiel_environment import build_environment

_application = ServerApplication(build_environment, OpenSpielOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
