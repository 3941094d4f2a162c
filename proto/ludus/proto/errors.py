"""The one place for the error model: what can go wrong, and how it is said.

    LudusError
    ├── UserError                 bad input; the command line ends with exit code 2
    │   ├── ConfigError           a run configuration that cannot work
    │   ├── NotFoundError         a file, folder, model, game or environment that is not there
    │   └── PortInUseError        something else listens on the port
    ├── EnvError                  a call to an environment session failed; has a wire code
    │   ├── InvalidCallError      malformed call: JSON, message type, schema
    │   ├── ActionError           the action cannot be taken; the session is untouched
    │   │   ├── IllegalActionError
    │   │   └── ActionParseError  text that is no action
    │   ├── EpisodeStateError     stepped before reset or after the end; wrong step number
    │   ├── ExecutionError        the environment's own code raised
    │   ├── CapacityError         no free session; says when to try again
    │   ├── RateLimitError        a tenant's quota or rate is used up
    │   ├── AuthenticationError   no token, or a wrong one
    │   ├── PermissionDeniedError the token does not allow this call
    │   ├── GroupMismatchError    sessions of one seed that begin differently
    │   ├── ToolError             a tool that is unknown or failed
    │   └── InfrastructureError   not the policy's doing: the episode is void, never a loss
    │       ├── SessionLostError  the session is gone
    │       ├── UnavailableError  the server cannot be reached, or takes no new sessions
    │       └── CallTimeoutError
    ├── ClusterError              the Kubernetes API refused a request, or cannot be reached
    ├── WeightSyncError           weights did not arrive, or are not those published
    │   ├── StoreUnavailableError        the weight store does not answer now
    │   └── CanaryError
    ├── AgentError                an agent failed, returned nothing readable, or did not end in time
    ├── RewardFunctionError       a reward function of the run's own raised, or returned no rewards
    ├── RolloutFunctionError      one that plays several groups at once raised, or returned no rows
    ├── EpisodesFailedError       nearly all that is played is void, since code fails
    ├── TrainingStalledError      nothing that is played comes to its end, or teaches anything
    ├── LearnerLostError          a learner rank died, or its ranks no longer meet
    ├── BufferLostError           the replay buffer died, with what waited in it
    ├── EngineLostError           the engine of a rollout worker failed; another worker takes over
    ├── WorkerStartError          a rollout worker does not start, try after try
    └── CheckpointError

A message names the value that was found, what was expected, and the way out. A failed
rollout is data, whatever failed: its status and reason say why, and only a UserError, or that
nearly all of them fail, ends the run. A failed optimizer step is a crash.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar, TypeGuard

_log = logging.getLogger(__name__)


class ErrorCode(StrEnum):
    """Stable codes on every wire. The first seven are OpenEnv's own."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"
    ILLEGAL_ACTION = "ILLEGAL_ACTION"
    ACTION_PARSE_ERROR = "ACTION_PARSE_ERROR"
    NOT_RESET = "NOT_RESET"
    EPISODE_OVER = "EPISODE_OVER"
    STEP_CONFLICT = "STEP_CONFLICT"
    SESSION_LOST = "SESSION_LOST"
    UNAVAILABLE = "UNAVAILABLE"
    TIMEOUT = "TIMEOUT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RATE_LIMITED = "RATE_LIMITED"
    DRAINING = "DRAINING"
    GROUP_MISMATCH = "GROUP_MISMATCH"
    TOOL_ERROR = "TOOL_ERROR"
    REPLAY_MISMATCH = "REPLAY_MISMATCH"


MAX_ERROR_CHARS = 16_384
"""Of the message of an EnvError; the rest is left out."""


class LudusError(Exception):
    """Root of every error that Ludus raises on purpose."""


class UserError(LudusError):
    """Bad input: one clear message, exit code 2, nothing half-written."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A run configuration that cannot work."""


class NotFoundError(UserError):
    """A named thing that is not there."""


class PortInUseError(UserError):
    """Something else listens on the port."""


class EnvError(LudusError):
    """A call to an environment session failed; `code` is what travels on the wire."""

    default_code: ClassVar[ErrorCode] = ErrorCode.EXECUTION_ERROR

    def __init__(
        self, message: str, code: ErrorCode | None = None, retry_after_s: float = 0.0
    ) -> None:
        message = _sendable(message)
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s
        """When to try again; 0 where that is not known."""

    def __reduce__(self) -> tuple[type[EnvError], tuple[str, ErrorCode, float]]:
        # Exception pickles only `args`; the code must cross process borders too.
        return type(self), (self.message, self.code, self.retry_after_s)


class InvalidCallError(EnvError):
    """A malformed call; the session, if any, is untouched."""

    default_code = ErrorCode.VALIDATION_ERROR


class ActionError(EnvError):
    """An action that cannot be taken; the session is untouched."""

    default_code = ErrorCode.ILLEGAL_ACTION


class IllegalActionError(ActionError):
    """An action that the rules do not allow now."""


class ActionParseError(ActionError):
    """Text from which no action can be read."""

    default_code = ErrorCode.ACTION_PARSE_ERROR


class EpisodeStateError(EnvError):
    """A call that does not fit the episode's progress."""

    default_code = ErrorCode.NOT_RESET


class ExecutionError(EnvError):
    """The environment's own code raised."""


class CapacityError(EnvError):
    """All sessions of the server are taken."""

    default_code = ErrorCode.CAPACITY_REACHED


class RateLimitError(EnvError):
    """A tenant's quota or rate is used up for now."""

    default_code = ErrorCode.RATE_LIMITED


class PermissionDeniedError(EnvError):
    """The token is good, but not for this call."""

    default_code = ErrorCode.PERMISSION_DENIED


class GroupMismatchError(EnvError):
    """Sessions that were opened on one seed begin differently."""

    default_code = ErrorCode.GROUP_MISMATCH


class ToolError(EnvError):
    """A tool that the environment does not have, or that failed."""

    default_code = ErrorCode.TOOL_ERROR


class AuthenticationError(EnvError):
    """The token is missing or wrong."""

    default_code = ErrorCode.UNAUTHENTICATED


class InfrastructureError(EnvError):
    """Not the policy's doing: the episode is void and must not be scored."""

    default_code = ErrorCode.UNAVAILABLE


class SessionLostError(InfrastructureError):
    """The session is gone: its server or worker died, or it was closed."""

    default_code = ErrorCode.SESSION_LOST


class UnavailableError(InfrastructureError):
    """The server cannot be reached."""


class CallTimeoutError(InfrastructureError):
    """The server did not answer in time."""

    default_code = ErrorCode.TIMEOUT


class ClusterError(LudusError):
    """The Kubernetes API server refused a request, or cannot be reached."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """The HTTP status; 0 where no answer came."""
        self.retry_after_s = retry_after_s
        """When to try again; 0 where that is not known."""

    def __reduce__(self) -> tuple[type[ClusterError], tuple[str, int, float]]:
        # Exception pickles only `args`; the status must cross process borders too.
        return type(self), (self.message, self.status, self.retry_after_s)


class WeightSyncError(LudusError):
    """Published weights did not arrive whole."""


class StoreUnavailableError(WeightSyncError):
    """The weight store does not answer now; it may a moment later."""


class CanaryError(WeightSyncError):
    """A worker's weights are not the ones that were published."""


class TrainingStalledError(LudusError):
    """No groups come, or none that can be trained on."""


class RewardFunctionError(LudusError):
    """A reward function raised, took too long, or returned something other than rewards."""


class RolloutFunctionError(LudusError):
    """A rollout function that plays several groups in one call returned none that can be used."""


class AgentError(LudusError):
    """The agent of an episode failed, returned nothing that can be read, or did not end in time."""


class EpisodesFailedError(LudusError):
    """Nearly all episodes fail, for a reason that the message names."""


class EngineLostError(LudusError):
    """The engine of a rollout worker has failed; all that it generated is lost."""


class LearnerLostError(LudusError):
    """A rank of the learner died, or the ranks no longer meet; the others have been ended."""


class BufferLostError(LudusError):
    """The replay buffer died, and what waited in it is gone."""


class WorkerStartError(LudusError):
    """A rollout worker does not start, try after try."""


class CheckpointError(UserError):
    """A checkpoint that cannot be read, or written."""


_CLASS_OF_CODE: dict[ErrorCode, type[EnvError]] = {
    ErrorCode.INVALID_JSON: InvalidCallError,
    ErrorCode.UNKNOWN_TYPE: InvalidCallError,
    ErrorCode.VALIDATION_ERROR: InvalidCallError,
    ErrorCode.EXECUTION_ERROR: ExecutionError,
    ErrorCode.CAPACITY_REACHED: CapacityError,
    ErrorCode.FACTORY_ERROR: ExecutionError,
    ErrorCode.SESSION_ERROR: SessionLostError,
    ErrorCode.ILLEGAL_ACTION: IllegalActionError,
    ErrorCode.ACTION_PARSE_ERROR: ActionParseError,
    ErrorCode.NOT_RESET: EpisodeStateError,
    ErrorCode.EPISODE_OVER: EpisodeStateError,
    ErrorCode.STEP_CONFLICT: EpisodeStateError,
    ErrorCode.SESSION_LOST: SessionLostError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.TIMEOUT: CallTimeoutError,
    ErrorCode.UNAUTHENTICATED: AuthenticationError,
    ErrorCode.PERMISSION_DENIED: PermissionDeniedError,
    ErrorCode.RATE_LIMITED: RateLimitError,
    ErrorCode.DRAINING: UnavailableError,
    ErrorCode.GROUP_MISMATCH: GroupMismatchError,
    ErrorCode.TOOL_ERROR: ToolError,
    ErrorCode.REPLAY_MISMATCH: SessionLostError,
}


def error_from_wire(code: str, message: str, retry_after_s: float = 0.0) -> EnvError:
    """The exception that a wire code stands for; an unknown code is an ExecutionError."""
    try:
        known = ErrorCode(code)
    except ValueError:
        return ExecutionError(f"{message} (code: {code})")
    return _CLASS_OF_CODE[known](message, known, retry_after_s)


def message_of(error: BaseException) -> str:
    """What an exception says, as every wire can carry it; a word where it cannot be asked."""
    try:
        return _sendable(str(error))
    except BaseException:  # noqa: BLE001 - the boundary to foreign code: its own __str__ raised
        return "(no message)"


def failure(
    what: str,
    error: BaseException,
    code: ErrorCode = ErrorCode.EXECUTION_ERROR,
    *,
    more: str = "",
) -> ExecutionError:
    """The error that stands for what foreign code has raised, between `what` and `more`."""
    told = ExecutionError(f"{what}{type(error).__name__}: {message_of(error)}{more}", code)
    told.__cause__ = error
    return told


def as_env_error(error: Exception) -> EnvError:
    """The error itself, or one that stands for a fault of our own, which is logged.

    For the wires: whatever one call meets, the others on its connection are answered.
    """
    if is_whole(error):
        return error
    _log.error("a call could not be answered", exc_info=error)
    return failure("the call failed with ", error)


def is_whole(error: BaseException) -> TypeGuard[EnvError]:
    """True for an EnvError; a foreign subclass may never have called its base class."""
    if not isinstance(error, EnvError):
        return False
    has_text = isinstance(getattr(error, "message", None), str)
    return has_text and isinstance(getattr(error, "code", None), ErrorCode)


def forget_frames(error: BaseException) -> None:
    """Let go of all that an error, which has been told, came through.

    Where a frame of its traceback has a name for the error, or for whatever holds it, they keep
    each other, and what the environment returned with them: megabytes that stay until garbage is
    collected, which on a quiet server is never.
    """
    known: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        one.__traceback__ = None
        chain += (one.__cause__, one.__context__)


def _sendable(message: str) -> str:
    """The message bounded, and without lone surrogates."""
    if len(message) > MAX_ERROR_CHARS:
        message = f"{message[:MAX_ERROR_CHARS]}..."
    return message if message.isascii() else message.encode(errors="backslashreplace").decode()


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint at the closest of the names; empty when none is close."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean '{close[0]}'?" if close else ""
