"""The gRPC and HTTP status of each error code; docs/errors.md contains the same table."""

from __future__ import annotations

from typing import NamedTuple

from grpc import StatusCode

from ludus.proto.errors import ErrorCode


class StatusPair(NamedTuple):
    """The gRPC and HTTP status of one error code."""

    grpc_status: StatusCode
    http_status: int


STATUSES_BY_CODE = {
    ErrorCode.INVALID_JSON: StatusPair(StatusCode.INVALID_ARGUMENT, 400),
    ErrorCode.UNKNOWN_TYPE: StatusPair(StatusCode.INVALID_ARGUMENT, 400),
    ErrorCode.VALIDATION_ERROR: StatusPair(StatusCode.INVALID_ARGUMENT, 422),
    ErrorCode.EXECUTION_ERROR: StatusPair(StatusCode.UNKNOWN, 500),
    ErrorCode.FACTORY_ERROR: StatusPair(StatusCode.UNKNOWN, 500),
    ErrorCode.CAPACITY_REACHED: StatusPair(StatusCode.RESOURCE_EXHAUSTED, 503),
    ErrorCode.SESSION_ERROR: StatusPair(StatusCode.NOT_FOUND, 404),
    ErrorCode.SESSION_LOST: StatusPair(StatusCode.NOT_FOUND, 410),
    ErrorCode.ILLEGAL_ACTION: StatusPair(StatusCode.INVALID_ARGUMENT, 422),
    ErrorCode.ACTION_PARSE_ERROR: StatusPair(StatusCode.INVALID_ARGUMENT, 422),
    ErrorCode.NOT_RESET: StatusPair(StatusCode.FAILED_PRECONDITION, 409),
    ErrorCode.EPISODE_OVER: StatusPair(StatusCode.FAILED_PRECONDITION, 409),
    ErrorCode.STEP_CONFLICT: StatusPair(StatusCode.FAILED_PRECONDITION, 409),
    ErrorCode.UNAVAILABLE: StatusPair(StatusCode.UNAVAILABLE, 503),
    ErrorCode.DRAINING: StatusPair(StatusCode.UNAVAILABLE, 503),
    ErrorCode.TIMEOUT: StatusPair(StatusCode.DEADLINE_EXCEEDED, 504),
    ErrorCode.UNAUTHENTICATED: StatusPair(StatusCode.UNAUTHENTICATED, 401),
    ErrorCode.PERMISSION_DENIED: StatusPair(StatusCode.PERMISSION_DENIED, 403),
    ErrorCode.RATE_LIMITED: StatusPair(StatusCode.RESOURCE_EXHAUSTED, 429),
    ErrorCode.GROUP_MISMATCH: StatusPair(StatusCode.FAILED_PRECONDITION, 409),
    ErrorCode.TOOL_ERROR: StatusPair(StatusCode.INVALID_ARGUMENT, 422),
    ErrorCode.REPLAY_MISMATCH: StatusPair(StatusCode.DATA_LOSS, 410),
}
