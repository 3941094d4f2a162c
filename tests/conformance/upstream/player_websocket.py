"""Program that plays games with an OpenEnv client of 0.2 to 0.10, in its virtual environment.

Arguments: address, first seed, number of games. Prints the games as JSON.
"""

import json
import sys
from pathlib import Path

from openenv.core import GenericEnvClient

sys.path.insert(0, str(Path(__file__).parent))
from policy import choose_action, remove_metadata, select_state


def play(client, seed: int) -> dict:
    result = client.reset(seed=seed)
    results = [result]
    while not result.done:
        result = client.step({"action_id": choose_action(result.observation)})
        results.append(result)
    outcomes = [
        [remove_metadata(result.observation), result.reward, result.done] for result in results
    ]
    return {"results": outcomes, "state": select_state(client.state())}


def main(address: str, first_seed: int, num_games: int) -> None:
    client = GenericEnvClient(base_url=address)
    if hasattr(client, "sync"):  # the client of 0.2.1 is already synchronous
        client = client.sync()
    with client:
        games = [play(client, seed) for seed in range(first_seed, first_seed + num_games)]
    sys.stdout.write(json.dumps(games))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
