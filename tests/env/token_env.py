"""A token-level Gymnasium environment with the vocabulary size of GPT-2."""

from __future__ import annotations

import gymnasium
from gymnasium import spaces

NUM_TOKENS = 50257
END_TOKEN = 9
TOKENS_ENV_ID = "ludus-tests/Tokens-v0"


class CountingTokens(gymnasium.Env):
    """An environment whose reward is 1 if the action is the previous token plus 1.

    Token 9 ends the episode, and the environment inserts token 50 after each token 5.
    """

    num_created = 0

    def __init__(self, first_token: int = 0) -> None:
        self.action_space = spaces.Discrete(NUM_TOKENS)
        self.observation_space = spaces.Sequence(spaces.Discrete(NUM_TOKENS))
        self._first_token = first_token
        type(self).num_created += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tokens = [self._first_token, int(self.np_random.integers(1, 3))]
        return self.tokens, {"task": "count"}

    def step(self, action):
        reward = float(action == self.tokens[-1] + 1)
        self.tokens.append(action)
        if action == 5:
            self.tokens.append(50)
        return self.tokens, reward, action == END_TOKEN, False, {"last": action}


gymnasium.register(TOKENS_ENV_ID, CountingTokens)
