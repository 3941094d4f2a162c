"""Plays one episode with OpenEnv's own client; runs in the virtual environment of that client.

Arguments: server address, seed, actions (JSON list). Prints what each call returned, as a
JSON list of [observation, reward, done], then the state.
"""

import json
import sys

from openenv.core import GenericEnvClient


def main(address: str, seed: int, actions: list) -> None:
    client = GenericEnvClient(base_url=address).sync()
    with client:
        results = [client.reset(seed=seed)]
        results += [client.step(action) for action in actions]
        played = [[result.observation, result.reward, result.done] for result in results]
        sys.stdout.write(json.dumps({"results": played, "state": client.state()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
