"""The client of a server of arithmetic.

with MathEnv(base_url="http://localhost:8005") as env:
    result = env.reset(seed=7)
    result = env.step(MathAction(answer=19))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ludus.env import StepResult, TextView
from ludus.env.sync_client import EnvClient, Session

from .models import MathAction, MathObservation, MathState


@dataclass(frozen=True, slots=True)
class MathResult:
    """What one reset or step led to."""

    observation: MathObservation
    reward: float | None
    """None after a reset."""
    terminated: bool
    truncated: bool
    text: TextView | None

    @property
    def done(self) -> bool:
        """True when the episode is over, for either reason."""
        return self.terminated or self.truncated


class MathEnv:
    """One session at a server; `reset` starts the next episode in it.

    Args:
        base_url: http://, ws:// or grpc://.
        token: for servers that ask for one.
    """

    def __init__(
        self, base_url: str = "http://localhost:8005", *, token: str | None = None
    ) -> None:
        self._client = EnvClient.connect(base_url, token=token)
        self._session: Session | None = None

    def reset(self, seed: int | None = None) -> MathResult:
        """The first view of a new episode."""
        return _typed(self._opened().reset(seed=seed))

    def step(self, action: MathAction) -> MathResult:
        """What the action led to."""
        return _typed(self._opened().step(action))

    def state(self) -> MathState:
        """Where the episode stands."""
        return MathState.model_validate(self._opened().state())

    def close(self) -> None:
        """Ends the session and the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _opened(self) -> Session:
        if self._session is None:
            self._session = self._client.open_session()
        return self._session


def _typed(result: StepResult) -> MathResult:
    return MathResult(
        observation=MathObservation.model_validate(result.observation),
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        text=result.text,
    )
