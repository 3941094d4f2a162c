"""The base of an environment package's own client: one session, typed as its models say.

class CoinEnv(TypedEnv[CoinAction, CoinObservation, CoinState]):
    observation_type = CoinObservation
    state_type = CoinState
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from pydantic import BaseModel

from ludus.env.client.containers import (
    READY_TIMEOUT_S,
    ContainerProvider,
    LocalContainers,
    hub_image,
)
from ludus.env.client.sync import EnvClient, Session
from ludus.env.security.variables import TOKEN_VARIABLE
from ludus.env.types import Action, StepResult, TextView

ActionT = TypeVar("ActionT", bound=Action)
ObservationT = TypeVar("ObservationT", bound=BaseModel)
StateT = TypeVar("StateT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class TypedResult(Generic[ObservationT]):
    """What one reset or step led to."""

    observation: ObservationT
    reward: float | None
    """None after a reset."""
    terminated: bool
    truncated: bool
    text: TextView | None
    """The same for language models; None from servers that have no text."""
    success: bool | None = None
    """Whether the episode that ended here succeeded; None where the environment does not say."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays too large for JSON, by name."""

    @property
    def done(self) -> bool:
        """True when the episode is over, for either reason."""
        return self.terminated or self.truncated


class TypedEnv(Generic[ActionT, ObservationT, StateT]):
    """One session at a server; `reset` starts the next episode in it.

    Args:
        base_url: http:// or ws://, also of OpenEnv's own servers, or grpc:// for ours.
        token: for servers that ask for one.

    Raises:
        UnavailableError: the server did not answer.
        AuthenticationError: the token is missing or wrong.
    """

    observation_type: type[ObservationT]
    state_type: type[StateT]
    default_url: ClassVar[str] = "http://localhost:8000"

    def __init__(self, base_url: str | None = None, *, token: str | None = None) -> None:
        self._url, self._token = base_url or self.default_url, token
        self._client = EnvClient.connect(self._url, token=token)
        self._session: Session | None = None
        self._is_closed = False
        self._container: ContainerProvider | None = None
        """Holds the server, where it was started for this client."""

    @classmethod
    def from_docker_image(
        cls,
        image: str,
        provider: ContainerProvider | None = None,
        env_vars: Mapping[str, str] | None = None,
        port: int | None = None,
        *,
        timeout_s: float = READY_TIMEOUT_S,
    ) -> Self:
        """A client of a server in a container of its own, which ends with it.

        Args:
            image: its server listens on port 8000, as OpenEnv's do.
            provider: what starts the container; None is docker or podman on this machine. One of
                OpenEnv's does, too.
            env_vars: variables in the container, for example {"OPENSPIEL_GAME": "blackjack"}.
                LUDUS_ENV_TOKEN, the token that servers of ours ask for, is drawn where it is not
                given.
            port: of this machine; None takes a free one.
            timeout_s: within which the server must answer.

        Raises:
            ConfigError: there is no docker or podman, or it refuses image or port.
            UnavailableError: the server ended, or did not answer in time.
        """
        container: ContainerProvider = LocalContainers() if provider is None else provider
        # Servers of ours ask for it, and so play with nobody else on this machine.
        variables = {TOKEN_VARIABLE: secrets.token_urlsafe(), **(env_vars or {})}
        try:
            base_url = container.start_container(image, port=port, env_vars=variables)
            container.wait_for_ready(base_url, timeout_s=timeout_s)
            client = cls(base_url, token=variables[TOKEN_VARIABLE] or None)
        except BaseException:
            container.stop_container()
            raise
        client._container = container
        return client

    @classmethod
    def from_hub(
        cls,
        repository: str,
        provider: ContainerProvider | None = None,
        env_vars: Mapping[str, str] | None = None,
        port: int | None = None,
        *,
        tag: str = "latest",
        timeout_s: float = READY_TIMEOUT_S,
    ) -> Self:
        """A client of an environment of the Hugging Face Hub, in a container of its own here.

        Args:
            repository: the Space that serves it, as owner/name.
            tag: of its image.

        Raises:
            ConfigError: the name has another form, or what `from_docker_image` raises.
            UnavailableError: as there.
        """
        image = hub_image(repository, tag)
        return cls.from_docker_image(image, provider, env_vars, port, timeout_s=timeout_s)

    def reset(self, seed: int | None = None) -> TypedResult[ObservationT]:
        """The first view of a new episode, which follows from the seed."""
        if self._session is None:
            self._session, first = self._client.open(seed=seed)
            return self._typed(first)
        return self._typed(self._session.reset(seed=seed))

    def step(self, action: ActionT) -> TypedResult[ObservationT]:
        """What the action led to.

        Raises:
            IllegalActionError: the rules do not allow it; the episode is unchanged.
        """
        return self._typed(self._opened().step(action))

    def state(self) -> StateT:
        """Where the episode stands."""
        return self.state_type.model_validate(self._opened().state())

    def close(self) -> None:
        """End the session, the connection, and the container that was started for them."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._client.close()
        finally:
            if self._container is not None:
                self._container.stop_container()

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that plays with it may be sent elsewhere, and gets a session of its own there.
        return partial(type(self), token=self._token), (self._url,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _opened(self) -> Session:
        if self._session is None:
            self._session = self._client.open_session()
        return self._session

    def _typed(self, result: StepResult) -> TypedResult[ObservationT]:
        return TypedResult(
            observation=self.observation_type.model_validate(result.observation),
            reward=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            text=result.text,
            success=result.success,
            tensors=result.tensors,
        )
