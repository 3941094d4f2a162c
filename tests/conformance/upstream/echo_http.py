"""Program that calls the echo environment with OpenEnv's 0.1.x client.

It runs in the client's virtual environment. Argument: address. It prints the responses as JSON.
"""

import json
import sys

from openenv_core.client_types import StepResult
from openenv_core.http_env_client import HTTPEnvClient


class EchoClient(HTTPEnvClient):
    def _step_payload(self, action):
        return {"message": action}

    def _parse_result(self, payload):
        return StepResult(payload["observation"], payload.get("reward"), payload["done"])

    def _parse_state(self, payload):
        return payload


def main(address: str) -> None:
    client = EchoClient(base_url=address)
    reset_result = client.reset()
    step_result = client.step("Hello, World!")
    client.close()
    sys.stdout.write(
        json.dumps(
            {
                "ready": reset_result.observation["echoed_message"],
                "echoed": step_result.observation["echoed_message"],
                "length": step_result.observation["message_length"],
                "reward": step_result.reward,
                "done": step_result.done,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
