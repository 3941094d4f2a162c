"""A server with OpenEnv's tool environment.

python upstream_tools_program.py ludus|openenv READY_FILE
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path


def serve_with_ludus(ready_file: Path) -> None:
    """Run a Ludus server with the environment until the process is killed."""
    from ludus.env.serving.application import ServerApplication
    from ludus.env.targets.targets import environment_factory

    factory = environment_factory("openenv:upstream_tools_environment:ToolsEnvironment", {})
    ServerApplication(factory).main(["--port", "0", "--ready-file", str(ready_file)])


def serve_with_openenv(ready_file: Path) -> None:
    """Run an OpenEnv server with the environment until the process is killed."""
    import uvicorn
    from openenv.core.env_server import create_app
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from upstream_tools_environment import ToolsEnvironment

    app = create_app(ToolsEnvironment, CallToolAction, CallToolObservation, env_name="tools")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ready_file.write_text(json.dumps({"http": address}))
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    {"ludus": serve_with_ludus, "openenv": serve_with_openenv}[sys.argv[1]](Path(sys.argv[2]))
