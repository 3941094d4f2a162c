"""One Atari 2600 with a game in it: the only module that knows the emulator.

A ROM takes 0.3 s to load, a kept state 0.1 ms: a console goes back to the state in which it was
switched on, and one that is closed is kept for the next session of its game. The emulator's own
chance is not used, for it cannot be seeded without loading again.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np

from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean

from ..models import ObsType

_EMULATOR_SEED = 1

_Key = tuple[str, int | None, int | None]
_Machine = tuple[Any, Any]
"""An emulator, and its state just after it was switched on."""

_idle: dict[_Key, list[_Machine]] = {}
_lock = threading.Lock()


class Console:
    """An Atari 2600 that repeats what is pressed.

    Args:
        game: a name out of `ale_py.roms`, such as "space_invaders".
        has_all_actions: offers all 18 actions; else those that do something in this game.
        repeat_action_probability: of each frame to go on with the action before.
        mode: one of the game's own modes; None is its first.
        difficulty: one of the game's own; None is its first.

    Raises:
        NotFoundError: there is no game of that name.
        ConfigError: ale-py is not installed, or the game has no such mode or difficulty.
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
        ale_py = _emulator()
        games = ale_py.roms.get_all_rom_ids()
        if game not in games:
            hint = did_you_mean(game, games) or "ale_py.roms.get_all_rom_ids() lists all"
            raise NotFoundError(f"expected the name of an Atari game, got {game!r}; {hint}")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._key = (game, mode, difficulty)
        self._machine: _Machine | None = _taken(self._key) or _loaded(ale_py, *self._key)
        ale, self._switched_on = self._machine
        self._ale = ale
        self._actions = ale.getLegalActionSet() if has_all_actions else ale.getMinimalActionSet()
        self._repeat_probability = repeat_action_probability
        self._switch_on(random.Random(0))

    @property
    def action_names(self) -> list[str]:
        """The name of each action, by its number."""
        return [action.name for action in self._actions]

    @property
    def lives(self) -> int:
        """Lives left."""
        return int(self._ale.lives())

    @property
    def num_frames(self) -> int:
        """Frames since the reset."""
        return int(self._ale.getEpisodeFrameNumber())

    @property
    def is_over(self) -> bool:
        """True when the game is over by its own rules."""
        return bool(self._ale.game_over(with_truncation=False))

    @property
    def memory(self) -> np.ndarray:
        """The 128 bytes of the console's memory, uint8."""
        return self._ale.getRAM()

    def seen(self, obs_type: ObsType) -> np.ndarray:
        """The memory, or the picture: uint8 of (210, 160, 3) or (210, 160)."""
        if obs_type == "ram":
            return self.memory
        is_coloured = obs_type == "rgb"
        return self._ale.getScreenRGB() if is_coloured else self._ale.getScreenGrayscale()

    def reset(self, rng: random.Random, max_waiting_frames: int) -> None:
        """Switch it on, and let some frames pass, at most so many.

        The games know no chance of their own, so the wait is what makes episodes differ.
        """
        self._switch_on(rng)
        for _ in range(rng.randint(0, max_waiting_frames)):
            self._ale.act(self._actions[0])
            if self.is_over:
                self._switch_on(rng)

    def press(self, action_id: int, num_frames: int) -> float:
        """The points of so many frames, fewer where the game ends."""
        points = 0.0
        for _ in range(num_frames):
            if not self._repeat_probability or self._rng.random() >= self._repeat_probability:
                self._pressed = action_id
            points += self._ale.act(self._actions[self._pressed])
            if self.is_over:
                break
        return points

    def close(self) -> None:
        """Leave the machine to the next session; without effect the second time."""
        machine, self._machine = self._machine, None
        if machine is not None:
            with _lock:
                _idle.setdefault(self._key, []).append(machine)

    def _switch_on(self, rng: random.Random) -> None:
        self._ale.restoreState(self._switched_on)
        self._rng = rng
        self._pressed = 0


def _emulator() -> Any:
    try:
        import ale_py
    except ModuleNotFoundError as error:
        raise ConfigError(
            "expected the Arcade Learning Environment, which is not installed; pip install"
            " 'ale-py>=0.11,<0.13' (it and the games in it are under the GPL-2.0)"
        ) from error
    return ale_py


def _taken(key: _Key) -> _Machine | None:
    """A machine that nobody uses."""
    with _lock:
        machines = _idle.get(key)
        return machines.pop() if machines else None


def _loaded(ale_py: Any, game: str, mode: int | None, difficulty: int | None) -> _Machine:
    """A new machine.

    Raises:
        ConfigError: the game has no such mode or difficulty.
    """
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", _EMULATOR_SEED)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(ale_py.roms.get_rom_path(game))
    if mode is not None:
        _require("mode", mode, ale.getAvailableModes(), game)
        ale.setMode(mode)
    if difficulty is not None:
        _require("difficulty", difficulty, ale.getAvailableDifficulties(), game)
        ale.setDifficulty(difficulty)
    ale.reset_game()
    return ale, ale.cloneState(include_rng=True)


def _require(name: str, value: int, offered: list[int], game: str) -> None:
    if value not in offered:
        raise ConfigError(f"expected a {name} of {game} out of {offered}, got {value!r}")
