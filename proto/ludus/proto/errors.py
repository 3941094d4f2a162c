"""The error tree, the error codes on the wires, and the conversion between them.

    LudusError
    ├── UserError                 bad input; the command line exits with code 2
    │   ├── ConfigError           a run configuration that cannot work
    │   ├── NotFoundError         a file, folder, model, game or environment does not exist
    │   ├── PortInUseError        another process listens on the port
    │   └── CheckpointError       a checkpoint cannot be read or written
    ├── EnvError                  a call to an environment session failed; has an error code
    │   ├── InvalidCallError      malformed call: JSON, message type, schema
    │   ├── ActionError           the action is not possible; the session is unchanged
    │   │   ├── IllegalActionError
    │   │   └── ActionParseError  the text is not an action
    │   ├── EpisodeStateError     step before reset, step after the end, or wrong step number
    │   ├── ExecutionError        the code of the environment raised an error
    │   ├── CapacityError         no free session; reports when to retry
    │   ├── RateLimitError        a tenant exceeded its quota or rate
    │   ├── AuthenticationError   missing or wrong token
    │   ├── PermissionDeniedError the token does not allow this call
    │   ├── GroupMismatchError    sessions with one seed have different first observations
    │   ├── ToolError             an unknown or failed tool
    │   └── InfrastructureError   the infrastructure failed: the episode is void
    │       ├── SessionLostError  the session does not exist any longer
    │       ├── UnavailableError  the server is unreachable, or accepts no new sessions
    │       └── CallTimeoutError
    ├── ClusterError              the Kubernetes API refused a request, or is unreachable
    ├── WeightSyncError           weights did not arrive, or differ from the published weights
    │   ├── StoreUnavailableError the weight store does not respond at the moment
    │   └── CanaryError
    ├── AgentError                an agent failed, exceeded its time, or returned invalid output
    ├── RewardFunctionError       a reward function raised an error, or returned no rewards
    ├── RolloutFunctionError      a batch rollout function raised an error, or returned no rows
    ├── EpisodesFailedError       code fails in nearly all episodes
    ├── TrainingStalledError      no group finishes, or no group can be trained on
    ├── LearnerLostError          a learner rank died, or the ranks cannot communicate
    ├── LearnerMemoryError        a learner rank ran out of memory; smaller micro-batches may help
    ├── BufferLostError           the replay buffer died with its groups
    ├── EngineLostError           the engine of a rollout worker failed; another worker takes over
    └── WorkerStartError          a rollout worker failed to start several times

A message names the value, the expectation and the remedy. A failed episode raises no error
to the run: its status and reason are recorded. Only a UserError, or a failure of nearly all
episodes, stops the run. A failed optimizer step stops it always.
"""

from __future__ import annotations

import difflib
import logging
import traceback
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar, TypeGuard

_log = logging.getLogger(__name__)


class ErrorCode(StrEnum):
    """Stable error codes on all wires. The first seven are those of OpenEnv."""

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
"""Maximum length of the message of an EnvError; longer messages are cut."""


class LudusError(Exception):
    """Base class of all errors that Ludus raises."""


class UserError(LudusError):
    """Bad input. The command line prints the message and exits with code 2."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A run configuration that cannot work."""


class NotFoundError(UserError):
    """A file, folder, model, game or environment that does not exist."""


class PortInUseError(UserError):
    """A port on which another process listens."""


class EnvError(LudusError):
    """A failed call to an environment session. The wires transmit its `code`."""

    default_code: ClassVar[ErrorCode] = ErrorCode.EXECUTION_ERROR

    def __init__(
        self, message: str, code: ErrorCode | None = None, retry_after_s: float = 0.0
    ) -> None:
        message = _make_sendable(message)
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s
        """Time in seconds until a retry makes sense; 0 if unknown."""

    def __reduce__(self) -> tuple[type[EnvError], tuple[str, ErrorCode, float]]:
        # Exception pickles only `args`, without the code.
        return type(self), (self.message, self.code, self.retry_after_s)


class InvalidCallError(EnvError):
    """A malformed call. The session is unchanged."""

    default_code = ErrorCode.VALIDATION_ERROR


class ActionError(EnvError):
    """An action that is not possible. The session is unchanged."""

    default_code = ErrorCode.ILLEGAL_ACTION


class IllegalActionError(ActionError):
    """An action that the rules do not allow at the moment."""


class ActionParseError(ActionError):
    """Text that cannot be parsed as an action."""

    default_code = ErrorCode.ACTION_PARSE_ERROR


class EpisodeStateError(EnvError):
    """A call at the wrong time of an episode."""

    default_code = ErrorCode.NOT_RESET


class ExecutionError(EnvError):
    """An error raised by the code of the environment."""


class CapacityError(EnvError):
    """A server without a free session."""

    default_code = ErrorCode.CAPACITY_REACHED


class RateLimitError(EnvError):
    """A tenant that exceeded its quota or rate."""

    default_code = ErrorCode.RATE_LIMITED


class PermissionDeniedError(EnvError):
    """A valid token that does not allow this call."""

    default_code = ErrorCode.PERMISSION_DENIED


class GroupMismatchError(EnvError):
    """Sessions with one seed and different first observations."""

    default_code = ErrorCode.GROUP_MISMATCH


class ToolError(EnvError):
    """An unknown or failed tool."""

    default_code = ErrorCode.TOOL_ERROR


class AuthenticationError(EnvError):
    """A missing or wrong token."""

    default_code = ErrorCode.UNAUTHENTICATED


class InfrastructureError(EnvError):
    """A failure of the infrastructure: the episode is void and has no reward."""

    default_code = ErrorCode.UNAVAILABLE


class SessionLostError(InfrastructureError):
    """A session that no longer exists: its server or worker died, or it was closed."""

    default_code = ErrorCode.SESSION_LOST


class UnavailableError(InfrastructureError):
    """A server that cannot be reached."""


class CallTimeoutError(InfrastructureError):
    """A call without a response in time."""

    default_code = ErrorCode.TIMEOUT


class ClusterError(LudusError):
    """A request that the Kubernetes API server refused or did not receive."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """HTTP status; 0 without a response."""
        self.retry_after_s = retry_after_s
        """Time in seconds until a retry makes sense; 0 if unknown."""

    def __reduce__(self) -> tuple[type[ClusterError], tuple[str, int, float]]:
        # Exception pickles only `args`, without the status.
        return type(self), (self.message, self.status, self.retry_after_s)


class WeightSyncError(LudusError):
    """Published weights that did not arrive, or did not arrive completely."""


class StoreUnavailableError(WeightSyncError):
    """A weight store that does not respond at the moment."""


class CanaryError(WeightSyncError):
    """A worker whose weights differ from the published weights."""


class TrainingStalledError(LudusError):
    """A run in which no group finishes, or no group can be trained on."""


class RewardFunctionError(LudusError):
    """A reward function that raised an error, took too long, or returned no rewards."""


class RolloutFunctionError(LudusError):
    """A batch rollout function that raised an error, or returned no usable rows."""


class AgentError(LudusError):
    """An agent that failed, returned invalid output, or exceeded its time limit."""


class EpisodesFailedError(LudusError):
    """A failure of nearly all episodes."""


class EngineLostError(LudusError):
    """A failed engine of a rollout worker. Its unfinished completions are lost."""


class LearnerLostError(LudusError):
    """A learner rank that died or cannot communicate. The other ranks have been stopped."""


class LearnerMemoryError(LudusError):
    """A learner rank that ran out of memory in a training step.

    Args:
        max_tokens: number of tokens per micro-batch with which the step may succeed.
    """

    def __init__(self, message: str, max_tokens: int) -> None:
        super().__init__(message)
        self.max_tokens = max_tokens

    def __reduce__(self) -> tuple[type[LearnerMemoryError], tuple[str, int]]:
        # Exception pickles only `args`, without the number.
        return type(self), (str(self), self.max_tokens)


class BufferLostError(LudusError):
    """A replay buffer that died with its groups."""


class WorkerStartError(LudusError):
    """A rollout worker that failed to start several times."""


class CheckpointError(UserError):
    """A checkpoint that cannot be read or written."""


_ERROR_CLASS_BY_CODE: dict[ErrorCode, type[EnvError]] = {
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


def make_wire_error(code: str, message: str, retry_after_s: float = 0.0) -> EnvError:
    """Return the exception for an error code. An unknown code becomes an ExecutionError."""
    try:
        error_code = ErrorCode(code)
    except ValueError:
        return ExecutionError(f"{message} (code: {code})")
    return _ERROR_CLASS_BY_CODE[error_code](message, error_code, retry_after_s)


def read_error_message(error: BaseException) -> str:
    """Return an exception's message in a form that all wires can transmit."""
    try:
        return _make_sendable(str(error))
    except BaseException:  # noqa: BLE001 - third-party code: the error's __str__ raised
        return "(no message)"


def wrap_exception(
    prefix: str,
    error: BaseException,
    code: ErrorCode = ErrorCode.EXECUTION_ERROR,
    *,
    suffix: str = "",
) -> ExecutionError:
    """Return an ExecutionError for an exception of third-party code."""
    message = f"{prefix}{type(error).__name__}: {read_error_message(error)}{suffix}"
    wrapped_error = ExecutionError(message, code)
    wrapped_error.__cause__ = error
    return wrapped_error


def to_env_error(error: Exception) -> EnvError:
    """Return the error if it is an EnvError; otherwise log it and wrap it.

    Wires use this so that a bug in one call does not break other calls on the connection.
    """
    if is_complete_env_error(error):
        return error
    _log.error("a call failed unexpectedly", exc_info=error)
    return wrap_exception("the call failed with ", error)


def is_complete_env_error(error: BaseException) -> TypeGuard[EnvError]:
    """Return whether `error` is an EnvError with a message and a code.

    A third-party subclass may not have called the constructor of EnvError.
    """
    if not isinstance(error, EnvError):
        return False
    has_message = isinstance(getattr(error, "message", None), str)
    return has_message and isinstance(getattr(error, "code", None), ErrorCode)


def clear_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of a handled error, of its causes and of its contexts.

    A traceback keeps frames alive. If a frame refers to the error, both form a reference cycle,
    which keeps the environment's results in memory until the next garbage collection. On an idle
    server, that collection may never happen.
    """
    seen_ids: set[int] = set()
    pending_errors: list[BaseException | None] = [error]
    while pending_errors:
        current_error = pending_errors.pop()
        if current_error is None or id(current_error) in seen_ids:
            continue
        seen_ids.add(id(current_error))
        current_error.__traceback__ = None
        pending_errors += (current_error.__cause__, current_error.__context__)


def _make_sendable(message: str) -> str:
    """Cut a message to its maximum length and escape lone surrogates."""
    if len(message) > MAX_ERROR_CHARS:
        message = f"{message[:MAX_ERROR_CHARS]}..."
    return message if message.isascii() else message.encode(errors="backslashreplace").decode()


def describe_code_error(error: BaseException) -> str:
    """Return the type, the message and the line of an error that a user's code raised."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ('{error.filename}', line {error.lineno})"
    text = f"{type(error).__name__}: {read_error_message(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ('{frames[-1].filename}', line {frames[-1].lineno})" if frames else text


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint at the most similar name, or an empty string if no name is similar."""
    similar_names = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean '{similar_names[0]}'?" if similar_names else ""
