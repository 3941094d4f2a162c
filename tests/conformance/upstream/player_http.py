"""Program that plays games with OpenEnv's 0.1.x client, in its virtual environment.

Arguments: address, first seed (unused, because these clients cannot send seeds), number of games.
Prints the games as JSON.
"""

import json
import sys
from pathlib import Path

from openenv_core.client_types import StepResult
from openenv_core.http_env_client import HTTPEnvClient

sys.path.insert(0, str(Path(__file__).parent))
from policy import choose_action, remove_metadata, select_state


class GameClient(HTTPEnvClient):
    def _step_payload(self, action):
        return {"action_id": action}

    def _parse_result(self, payload):
        return StepResult(payload["observation"], payload.get("reward"), payload["done"])

    def _parse_state(self, payload):
        return payload


def play(client: GameClient) -> dict:
    result = client.reset()
    results = [result]
    while not result.done:
        result = client.step(choose_action(result.observation))
        results.append(result)
    outcomes = [
        [remove_metadata(result.observation), result.reward, result.done] for result in results
    ]
    return {"results": outcomes, "state": select_state(client.state())}


def main(address: str, num_games: int) -> None:
    client = GameClient(base_url=address)
    sys.stdout.write(json.dumps([play(client) for _ in range(num_games)]))
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]))
