"""Base class for the client of an environment package: one session with the package's types.

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

from ludus.env.client.client import EnvClient
from ludus.env.client.containers import (
    READY_TIMEOUT_S,
    ContainerProvider,
    LocalContainers,
    make_hub_image_name,
)
from ludus.env.client.session import Session
from ludus.env.sessions.options import TOKEN_VARIABLE
from ludus.env.transports.address import ConnectOptions
from ludus.env.types import Action, StepResult, TextView

ActionT = TypeVar("ActionT", bound=Action)
ObservationT = TypeVar("ObservationT", bound=BaseModel)
StateT = TypeVar("StateT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class TypedResult(Generic[ObservationT]):
    """The typed result of one reset or step."""

    observation: ObservationT
    reward: float | None
    """Reward of the step; None after a reset."""
    terminated: bool
    truncated: bool
    text: TextView | None
    """The observation as text for language models; None from servers without text."""
    success: bool | None = None
    """True if the episode ended with a success; None if the environment does not report that."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays that are too large for JSON, by name."""

    @property
    def done(self) -> bool:
        """True when the episode is terminated or truncated."""
        return self.terminated or self.truncated


class TypedEnv(Generic[ActionT, ObservationT, StateT]):
    """A client with one typed session. `reset` starts the session's next episode.

    Args:
        base_url: http:// or ws:// address of a Ludus or OpenEnv server, or grpc:// address of a
            Ludus server.
        token: bearer token for servers that require one.

    Raises:
        UnavailableError: the server did not respond.
        AuthenticationError: the token is missing or wrong.
    """

    observation_type: type[ObservationT]
    state_type: type[StateT]
    default_url: ClassVar[str] = "http://localhost:8000"

    def __init__(self, base_url: str | None = None, *, token: str | None = None) -> None:
        self._base_url, self._token = base_url or self.default_url, token
        self._client = EnvClient.connect(self._base_url, ConnectOptions(token=token))
        self._session: Session | None = None
        self._is_closed = False
        self._container_provider: ContainerProvider | None = None
        """The provider of the server's container, if the client started it."""

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
        """Start a container with a server, and return a client that stops it when closed.

        Args:
            image: container image whose server listens on port 8000, like the images of OpenEnv.
            provider: provider that starts the container, from Ludus or OpenEnv. Default: docker or
                podman on this machine.
            env_vars: variables in the container, for example {"OPENSPIEL_GAME": "blackjack"}.
                LUDUS_ENV_TOKEN, the token that Ludus servers require, is random by default.
            port: port on this machine. Default: a free port.
            timeout_s: time limit for the server's first response.

        Raises:
            ConfigError: there is no docker or podman, or it refuses the image or the port.
            UnavailableError: the server exited, or did not respond in time.
        """
        container_provider: ContainerProvider = LocalContainers() if provider is None else provider
        # The token keeps other clients on this machine from using the server.
        variables = {TOKEN_VARIABLE: secrets.token_urlsafe(), **(env_vars or {})}
        try:
            base_url = container_provider.start_container(image, port=port, env_vars=variables)
            container_provider.wait_for_ready(base_url, timeout_s=timeout_s)
            client = cls(base_url, token=variables[TOKEN_VARIABLE] or None)
        except BaseException:
            container_provider.stop_container()
            raise
        client._container_provider = container_provider
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
        """Start a container with an environment from the Hugging Face Hub, and return its client.

        Args:
            repository: Space of the environment, as owner/name.
            tag: tag of the Space's image.

        Raises:
            ConfigError: the repository name is malformed, or `from_docker_image` raised it.
            UnavailableError: the server exited, or did not respond in time.
        """
        image = make_hub_image_name(repository, tag)
        return cls.from_docker_image(image, provider, env_vars, port, timeout_s=timeout_s)

    def reset(self, seed: int | None = None) -> TypedResult[ObservationT]:
        """Start a new episode with the seed, and return its first result."""
        if self._session is None:
            self._session, first_result = self._client.open(seed=seed)
            return self._convert(first_result)
        return self._convert(self._session.reset(seed=seed))

    def step(self, action: ActionT) -> TypedResult[ObservationT]:
        """Take an action and return its result.

        Raises:
            IllegalActionError: the rules do not allow the action; the episode is unchanged.
        """
        return self._convert(self._require_session().step(action))

    def state(self) -> StateT:
        """Return the state of the episode."""
        return self.state_type.model_validate(self._require_session().state())

    def close(self) -> None:
        """Close the session and the connection, and stop the client's container if there is one."""
        if self._is_closed or self._client.loop_thread.is_copy:
            return
        self._is_closed = True
        try:
            self._client.close()
        finally:
            if self._container_provider is not None:
                self._container_provider.stop_container()

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled client opens a new session, so a function with a client can run elsewhere.
        return partial(type(self), token=self._token), (self._base_url,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _require_session(self) -> Session:
        if self._session is None:
            self._session = self._client.open_session()
        return self._session

    def _convert(self, result: StepResult) -> TypedResult[ObservationT]:
        return TypedResult(
            observation=self.observation_type.model_validate(result.observation),
            reward=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            text=result.text,
            success=result.success,
            tensors=result.tensors,
        )
