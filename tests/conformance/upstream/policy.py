"""Policy of all clients. The action depends only on the observation, so all clients play alike."""

import json
import zlib


def choose_action(observation: dict) -> int:
    """Return a legal action that depends only on the observation."""
    rounded_state = json.dumps([round(value, 4) for value in observation["info_state"]])
    legal_actions = observation["legal_actions"]
    return legal_actions[zlib.crc32(rounded_state.encode()) % len(legal_actions)]


def remove_metadata(observation: dict) -> dict:
    """Return the observation without its metadata, which clients before 0.10 do not return."""
    return {key: value for key, value in observation.items() if key != "metadata"}


def select_state(state: dict) -> dict:
    """Return the state without its random episode id."""
    return {"step_count": state["step_count"]}
