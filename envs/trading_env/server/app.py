"""The server program: `python -m trading_env.server.app --port 8009`.

`--help` lists its options.
"""

from __future__ import annotations

from ludus.env.serving.application import ServerApplication

from .. import DEFAULT_PORT
from ..options import TradingOptions
from .trading_environment import TradingEnvironment

_application = ServerApplication(TradingEnvironment, TradingOptions, DEFAULT_PORT)
main = _application.main
__getattr__ = _application.module_attribute

if __name__ == "__main__":
    main()
