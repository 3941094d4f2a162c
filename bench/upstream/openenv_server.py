"""An environment package of OpenEnv on a port, with 64 sessions.

The package's own application allows one session in the echo environment. Arguments: package, port.
"""

import importlib
import os
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app

NUM_SESSIONS = 64


def make_application(package):
    """Return the application of the package."""
    if package != "echo_env":
        os.environ["MAX_CONCURRENT_ENVS"] = str(NUM_SESSIONS)
        return importlib.import_module(f"{package}.server.app").app
    environment = importlib.import_module("echo_env.server.echo_environment").EchoEnvironment
    environment.SUPPORTS_CONCURRENT_SESSIONS = True
    models = importlib.import_module("echo_env.models")
    return create_app(
        environment,
        models.EchoAction,
        models.EchoObservation,
        env_name=package,
        max_concurrent_envs=NUM_SESSIONS,
    )


if __name__ == "__main__":
    uvicorn.run(make_application(sys.argv[1]), port=int(sys.argv[2]), log_level="warning")
