"""The client of an OpenSpiel server, used as OpenEnv's tutorials use theirs.

env = OpenSpielEnv(base_url="http://localhost:8004")
result = env.reset()
result = env.step(OpenSpielAction(action_id=1))
env.close()
"""

from __future__ import annotations

from dataclasses import dataclass

from ludus.env.sync_client import EnvClient, Session
from ludus.env.types import StepResult, TextView

from .models import OpenSpielAction, OpenSpielObservation, OpenSpielState


@dataclass(frozen=True, slots=True)
class OpenSpielResult:
    """What one reset or step led to."""

    observation: OpenSpielObservation
    reward: float | None
    """None after a reset."""
    terminated: bool
    truncated: bool
    text: TextView | None
    """The same for language models; None from servers that have no text."""

    @property
    def done(self) -> bool:
        """True when the episode is over, for either reason."""
        return self.terminated or self.truncated


class OpenSpielEnv:
    """One session at a server; `reset` starts the next episode in it.

    Args:
        base_url: http:// or ws://, also of OpenEnv's own servers, or grpc:// for ours.
        token: for servers that ask for one.

    Raises:
        UnavailableError: the server did not answer.
        AuthenticationError: the token is missing or wrong.
    """

    def __init__(
        self, base_url: str = "http://localhost:8004", *, token: str | None = None
    ) -> None:
        self._client = EnvClient.connect(base_url, token=token)
        self._session: Session | None = None

    def reset(self, seed: int | None = None) -> OpenSpielResult:
        """The first view of a new episode; the seed fixes deal and opponents."""
        if self._session is None:
            self._session, first = self._client.open(seed=seed)
            return _typed(first)
        return _typed(self._session.reset(seed=seed))

    def step(self, action: OpenSpielAction) -> OpenSpielResult:
        """What the move led to.

        Raises:
            IllegalActionError: the rules do not allow it; the episode is unchanged.
        """
        return _typed(self._opened().step(action))

    def state(self) -> OpenSpielState:
        """Where the episode stands and what is played."""
        return OpenSpielState.model_validate(self._opened().state())

    def close(self) -> None:
        """Ends the session and the connection."""
        self._client.close()

    def __enter__(self) -> OpenSpielEnv:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _opened(self) -> Session:
        if self._session is None:
            self._session = self._client.open_session()
        return self._session


def _typed(result: StepResult) -> OpenSpielResult:
    return OpenSpielResult(
        observation=OpenSpielObservation.model_validate(result.observation),
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        text=result.text,
    )
