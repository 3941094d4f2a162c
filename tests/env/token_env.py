"""A token-level Gymnasium environment with a vocabulary as large as GPT-2's."""

from __future__ import annotations

import gymnasium
from gymnasium import spaces

NUM_TOKENS = 50257
END_TOKEN = 9
TOKENS_ENV_ID = "ludus-tests/Tokens-v0"


class CountingTokens(gymnasium.Env):
    """An environment with reward 1 for the last token plus 1; 9 ends it, and 50 follows each 5."""

    num_made = 0

    def __init__(self, first: int = 0) -> None:
        self.action_space = spaces.Discrete(NUM_TOKENS)
        self.observation_space = spaces.Sequence(spaces.Discrete(NUM_TOKENS))
        self._first = first
        type(self).num_made += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tokens = [self._first, int(self.np_random.integers(1, 3))]
        return self.tokens, {"asked": "count"}

    def step(self, action):
        reward = float(action == self.tokens[-1] + 1)
        self.tokens.append(action)
        if action == 5:
            self.tokens.append(50)
        return self.tokens, reward, action == END_TOKEN, False, {"last": action}


gymnasium.register(TOKENS_ENV_ID, CountingTokens)
