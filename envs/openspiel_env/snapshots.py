"""What a seat sees in games whose tensors hold only zeros and ones, kept as bytes until asked for.

    state --Snapshots.take--> bytes --> JSON for the wire
                                    --> OpenSpielObservation, for whoever looks at it here

Turning a tensor into a list and the list into JSON takes longer than the move that led to it. On
a server without a text view nobody looks at the list.
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

_START = b'{"metadata":{},"info_state":['
_DIGIT_OF_HIGH_BYTE = bytes.maketrans(b"\x00\x3f", b"01")
"""A float32 is 00 00 00 00 for zero and 00 00 80 3f for one."""


class Snapshots:
    """Takes the observation tensor of one game's states as bytes.

    Making one takes longer than a hand of blackjack, so all seats of a process share it.
    """

    __slots__ = ("_floats", "_lock", "_observation", "_zeros")

    def __init__(self, game: pyspiel.Game) -> None:
        self._lock = threading.Lock()
        self._observation = make_observation(game)
        num_elements = self._observation.tensor.size
        self._floats = struct.Struct(f"={num_elements}f")
        self._zeros = bytearray(b"0.0," * num_elements)[:-1]

    def take(self, state: pyspiel.State, player: int) -> bytes:
        """The tensor's elements, float32."""
        with self._lock:
            self._observation.set_from(state, player)
            return self._observation.tensor.tobytes()

    def to_list(self, snapshot: bytes) -> list[float]:
        """The elements."""
        return list(self._floats.unpack(snapshot))

    def to_json(self, snapshot: bytes) -> bytearray:
        """The elements as they stand in a JSON list."""
        elements = self._zeros[:]
        elements[::4] = snapshot[3::4].translate(_DIGIT_OF_HIGH_BYTE)
        return elements


class SnapshotTransition(Transition[OpenSpielObservation]):
    """A transition whose observation is made when it is looked at.

    Args:
        rest: the observation's fields after `info_state`, in their order.
    """

    __slots__ = ("_made", "_rest", "_snapshot", "_snapshots")

    def __init__(
        self,
        snapshots: Snapshots,
        snapshot: bytes,
        rest: dict[str, Any],
        reward: float | None,
        terminated: bool,
        success: bool | None,
    ) -> None:
        self._snapshots = snapshots
        self._snapshot = snapshot
        self._rest = rest
        self._made: OpenSpielObservation | None = None
        self.reward = reward
        self.terminated = terminated
        self.truncated = False
        self.info = {}
        self.tensors = {}
        self.success = success

    @property
    def observation(self) -> OpenSpielObservation:  # type: ignore[override]  # a field there
        """What the seat sees."""
        if self._made is None:
            info_state = self._snapshots.to_list(self._snapshot)
            fields = {"metadata": {}, "info_state": info_state, **self._rest}
            self._made = OpenSpielObservation.of_fields(fields)
        return self._made

    def encoded_observation(self) -> tuple[bytes, JsonObject]:
        """The observation as JSON, and its metadata."""
        if self._made is not None:  # somebody may have changed it
            return super().encoded_observation()
        elements = self._snapshots.to_json(self._snapshot)
        return b"".join((_START, elements, b"],", orjson.dumps(self._rest)[1:])), {}
