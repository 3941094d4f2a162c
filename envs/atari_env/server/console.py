"""An Atari 2600 console with one game. Only this module uses the emulator.

Loading a ROM takes 0.3 s, restoring a state 0.1 ms. Therefore a reset restores the state after
power-on, and a closed console is reused by the next session of the same game. The emulator's own
randomness is not used, because a new seed requires loading the ROM again.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np

from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean

from ..models import ObsType

_EMULATOR_SEED = 1

_MachineKey = tuple[str, int | None, int | None]
"""Game, mode and difficulty."""
_Machine = tuple[Any, Any]
"""An emulator and its state after power-on."""

_idle_machines: dict[_MachineKey, list[_Machine]] = {}
_lock = threading.Lock()


class Console:
    """An Atari 2600 console.

    Args:
        game: Name in `ale_py.roms`, such as "space_invaders".
        has_all_actions: Offer all 18 actions. Otherwise only those with an effect in the game.
        repeat_action_probability: Probability that a frame repeats the previous action.
        mode: Mode of the game. None means its first mode.
        difficulty: Difficulty of the game. None means its first difficulty.

    Raises:
        NotFoundError: The game does not exist.
        ConfigError: ale-py is not installed, or the game does not have the mode or difficulty.
    """

    def __init__(
        self,
        game: str,
        *,
        has_all_actions: bool = False,
        repeat_action_probability: float = 0.0,
        mode: int | None = None,
        difficulty: int | None = None,
    ) -> None:
        ale_py = _import_emulator()
        games = ale_py.roms.get_all_rom_ids()
        if game not in games:
            hint = did_you_mean(game, games) or "`ludus env list --family atari` prints all games"
            raise NotFoundError(f"there is no Atari game {game!r}; {hint}")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._machine_key = (game, mode, difficulty)
        self._machine: _Machine | None = _take_idle_machine(self._machine_key) or _load_machine(
            ale_py, *self._machine_key
        )
        emulator, self._start_state = self._machine
        self._emulator = emulator
        self._actions = (
            emulator.getLegalActionSet() if has_all_actions else emulator.getMinimalActionSet()
        )
        self._repeat_probability = repeat_action_probability
        self._power_on(random.Random(0))

    @property
    def action_names(self) -> list[str]:
        """The name of each action, by action id."""
        return [action.name for action in self._actions]

    @property
    def lives(self) -> int:
        """The number of remaining lives."""
        return int(self._emulator.lives())

    @property
    def num_frames(self) -> int:
        """The number of frames since the reset."""
        return int(self._emulator.getEpisodeFrameNumber())

    @property
    def is_over(self) -> bool:
        """True if the game is over by its own rules."""
        return bool(self._emulator.game_over(with_truncation=False))

    @property
    def memory(self) -> np.ndarray:
        """The console's memory, uint8 [128]."""
        return self._emulator.getRAM()

    def read_screen(self, obs_type: ObsType) -> np.ndarray:
        """Return the memory or the picture, uint8 [128], [210, 160, 3] or [210, 160]."""
        if obs_type == "ram":
            return self.memory
        return (
            self._emulator.getScreenRGB()
            if obs_type == "rgb"
            else self._emulator.getScreenGrayscale()
        )

    def reset(self, rng: random.Random, max_waiting_frames: int) -> None:
        """Restart the game, then wait for a random number of frames.

        The games themselves have no randomness, so only the wait makes episodes differ.
        """
        self._power_on(rng)
        for _ in range(rng.randint(0, max_waiting_frames)):
            self._emulator.act(self._actions[0])
            if self.is_over:
                self._power_on(rng)

    def press(self, action_id: int, num_frames: int) -> float:
        """Apply an action for up to `num_frames` frames and return the points."""
        points = 0.0
        for _ in range(num_frames):
            if not self._repeat_probability or self._rng.random() >= self._repeat_probability:
                self._pressed_action_id = action_id
            points += self._emulator.act(self._actions[self._pressed_action_id])
            if self.is_over:
                break
        return points

    def close(self) -> None:
        """Make the machine available to the next session. A second call has no effect."""
        machine, self._machine = self._machine, None
        if machine is not None:
            with _lock:
                _idle_machines.setdefault(self._machine_key, []).append(machine)

    def _power_on(self, rng: random.Random) -> None:
        self._emulator.restoreState(self._start_state)
        self._rng = rng
        self._pressed_action_id = 0


def _import_emulator() -> Any:
    try:
        import ale_py
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the Arcade Learning Environment is not installed; pip install 'ale-py>=0.11,<0.13'"
            " (ale-py and its games are under the GPL-2.0)"
        ) from error
    return ale_py


def _take_idle_machine(key: _MachineKey) -> _Machine | None:
    with _lock:
        machines = _idle_machines.get(key)
        return machines.pop() if machines else None


def _load_machine(ale_py: Any, game: str, mode: int | None, difficulty: int | None) -> _Machine:
    """Load the ROM of a game.

    Raises:
        ConfigError: The game does not have the mode or difficulty.
    """
    emulator = ale_py.ALEInterface()
    emulator.setInt("random_seed", _EMULATOR_SEED)
    emulator.setFloat("repeat_action_probability", 0.0)
    emulator.loadROM(ale_py.roms.get_rom_path(game))
    if mode is not None:
        _require_available("mode", mode, emulator.getAvailableModes(), game)
        emulator.setMode(mode)
    if difficulty is not None:
        _require_available("difficulty", difficulty, emulator.getAvailableDifficulties(), game)
        emulator.setDifficulty(difficulty)
    emulator.reset_game()
    return emulator, emulator.cloneState(include_rng=True)


def _require_available(name: str, value: int, available_values: list[int], game: str) -> None:
    if value not in available_values:
        raise ConfigError(f"expected a {name} of {game} out of {available_values}, got {value!r}")
