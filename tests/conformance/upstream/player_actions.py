"""Program that plays a list of actions with OpenEnv's client, in its virtual environment.

Arguments: address, seed, actions (JSON list). Fails with the error that the client raises.
"""

import json
import sys

from openenv.core import GenericEnvClient


def main(address: str, seed: int, actions: list) -> None:
    with GenericEnvClient(base_url=address).sync() as client:
        client.reset(seed=seed)
        for action in actions:
            client.step(action)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
