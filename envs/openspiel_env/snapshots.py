"""Observations of games with binary tensors, stored as bytes until they are needed.

    state --SnapshotEncoder.take--> bytes --> JSON for the connection
                                    --> OpenSpielObservation, if the server itself uses it

Converting a tensor to a list, and the list to JSON, takes longer than a move. A server without
text views never needs the list.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import orjson
import pyspiel
from open_spiel.python.observation import make_observation

from ludus.env import Transition
from ludus.env.types import JsonObject

from .models import OpenSpielObservation

_JSON_START = b'{"metadata":{},"info_state":['
_DIGIT_BY_HIGH_BYTE = bytes.maketrans(b"\x00\x3f", b"01")
"""A float32 is 00 00 00 00 for zero and 00 00 80 3f for one."""


class SnapshotEncoder:
    """Converter from the states of one game to the bytes of their observation tensors.

    Creating one takes longer than a game of blackjack, so all seats of a process share it.
    """

    __slots__ = ("_float_format", "_lock", "_observation", "_zeros_json")

    def __init__(self, game: pyspiel.Game) -> None:
        self._lock = threading.Lock()
        self._observation = make_observation(game)
        num_elements = self._observation.tensor.size
        self._float_format = struct.Struct(f"={num_elements}f")
        self._zeros_json = bytearray(b"0.0," * num_elements)[:-1]

    def take_snapshot(self, state: pyspiel.State, player: int) -> bytes:
        """Return the elements of the tensor as float32 bytes."""
        with self._lock:
            self._observation.set_from(state, player)
            return self._observation.tensor.tobytes()

    def to_list(self, snapshot: bytes) -> list[float]:
        """Return the elements as floats."""
        return list(self._float_format.unpack(snapshot))

    def to_json(self, snapshot: bytes) -> bytearray:
        """Return the elements as the text of a JSON list, without brackets."""
        elements = self._zeros_json[:]
        elements[::4] = snapshot[3::4].translate(_DIGIT_BY_HIGH_BYTE)
        return elements


class SnapshotTransition(Transition[OpenSpielObservation]):
    """A transition that builds its observation on first use.

    Args:
        other_fields: Fields of the observation after `info_state`, in order.
    """

    __slots__ = ("_cached_observation", "_encoder", "_other_fields", "_snapshot")

    def __init__(
        self,
        encoder: SnapshotEncoder,
        snapshot: bytes,
        other_fields: dict[str, Any],
        reward: float | None,
        terminated: bool,
        success: bool | None,
    ) -> None:
        self._encoder = encoder
        self._snapshot = snapshot
        self._other_fields = other_fields
        self._cached_observation: OpenSpielObservation | None = None
        self.reward = reward
        self.terminated = terminated
        self.truncated = False
        self.info = {}
        self.tensors = {}
        self.success = success

    @property
    def observation(self) -> OpenSpielObservation:  # type: ignore[override]  # a field in the base class
        """The seat's observation."""
        if self._cached_observation is None:
            info_state = self._encoder.to_list(self._snapshot)
            fields = {"metadata": {}, "info_state": info_state, **self._other_fields}
            self._cached_observation = OpenSpielObservation.from_fields(fields)
        return self._cached_observation

    def encode_observation(self) -> tuple[bytes, JsonObject]:
        """Return the observation as JSON, and its metadata."""
        if self._cached_observation is not None:  # the caller may have changed it
            return super().encode_observation()
        elements = self._encoder.to_json(self._snapshot)
        return b"".join((_JSON_START, elements, b"],", orjson.dumps(self._other_fields)[1:])), {}
