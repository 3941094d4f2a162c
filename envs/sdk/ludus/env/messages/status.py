"""The gRPC and HTTP status of each error code; docs/errors.md contains the same table."""

from __future__ import annotations

from typing import NamedTuple

from grpc import StatusCode

from ludus.proto.errors import ErrorCode


class Status(NamedTuple):
    """The statuses of one error code."""

    grpc: StatusCode
    http: int


STATUS_OF_CODE = {
    ErrorCode.INVALID_JSON: Status(StatusCode.INVALID_ARGUMENT, 400),
    ErrorCode.UNKNOWN_TYPE: Status(StatusCode.INVALID_ARGUMENT, 400),
    ErrorCode.VALIDATION_ERROR: Status(StatusCode.INVALID_ARGUMENT, 422),
    ErrorCode.EXECUTION_ERROR: Status(StatusCode.UNKNOWN, 500),
    ErrorCode.FACTORY_ERROR: Status(StatusCode.UNKNOWN, 500),
    ErrorCode.CAPACITY_REACHED: Status(StatusCode.RESOURCE_EXHAUSTED, 503),
    ErrorCode.SESSION_ERROR: Status(StatusCode.NOT_FOUND, 404),
    ErrorCode.SESSION_LOST: Status(StatusCode.NOT_FOUND, 410),
    ErrorCode.ILLEGAL_ACTION: Status(StatusCode.INVALID_ARGUMENT, 422),
    ErrorCode.ACTION_PARSE_ERROR: Status(StatusCode.INVALID_ARGUMENT, 422),
    ErrorCode.NOT_RESET: Status(StatusCode.FAILED_PRECONDITION, 409),
    ErrorCode.EPISODE_OVER: Status(StatusCode.FAILED_PRECONDITION, 409),
    ErrorCode.STEP_CONFLICT: Status(StatusCode.FAILED_PRECONDITION, 409),
    ErrorCode.UNAVAILABLE: Status(StatusCode.UNAVAILABLE, 503),
    ErrorCode.DRAINING: Status(StatusCode.UNAVAILABLE, 503),
    ErrorCode.TIMEOUT: Status(StatusCode.DEADLINE_EXCEEDED, 504),
    ErrorCode.UNAUTHENTICATED: Status(StatusCode.UNAUTHENTICATED, 401),
    ErrorCode.PERMISSION_DENIED: Status(StatusCode.PERMISSION_DENIED, 403),
    ErrorCode.RATE_LIMITED: Status(StatusCode.RESOURCE_EXHAUSTED, 429),
    ErrorCode.GROUP_MISMATCH: Status(StatusCode.FAILED_PRECONDITION, 409),
    ErrorCode.TOOL_ERROR: Status(StatusCode.INVALID_ARGUMENT, 422),
    ErrorCode.REPLAY_MISMATCH: Status(StatusCode.DATA_LOSS, 410),
}
