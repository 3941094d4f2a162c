from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TextView(_message.Message):
    __slots__ = ("messages_json", "legal_answers")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    LEGAL_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    messages_json: bytes
    legal_answers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages_json: _Optional[bytes] = ..., legal_answers: _Optional[_Iterable[str]] = ...) -> None: ...

class TaskSet(_message.Message):
    __slots__ = ("num_tasks", "num_test_tasks", "columns")
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TEST_TASKS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    num_tasks: int
    num_test_tasks: int
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_tasks: _Optional[int] = ..., num_test_tasks: _Optional[int] = ..., columns: _Optional[_Iterable[str]] = ...) -> None: ...

class ReturnRange(_message.Message):
    __slots__ = ("lowest", "highest")
    LOWEST_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    lowest: float
    highest: float
    def __init__(self, lowest: _Optional[float] = ..., highest: _Optional[float] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("name", "description", "version", "action_schema_json", "observation_schema_json", "state_schema_json", "has_text_view", "max_sessions", "options_json", "reset_options", "takes_any_option", "is_deterministic", "tools_json", "server_id", "linger_s", "idle_timeout_s", "tasks", "takes_any_text", "return_range", "is_game")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTION_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    STATE_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    HAS_TEXT_VIEW_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    RESET_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TAKES_ANY_OPTION_FIELD_NUMBER: _ClassVar[int]
    IS_DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    LINGER_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    TAKES_ANY_TEXT_FIELD_NUMBER: _ClassVar[int]
    RETURN_RANGE_FIELD_NUMBER: _ClassVar[int]
    IS_GAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    version: str
    action_schema_json: bytes
    observation_schema_json: bytes
    state_schema_json: bytes
    has_text_view: bool
    max_sessions: int
    options_json: bytes
    reset_options: _containers.RepeatedScalarFieldContainer[str]
    takes_any_option: bool
    is_deterministic: bool
    tools_json: bytes
    server_id: str
    linger_s: float
    idle_timeout_s: float
    tasks: TaskSet
    takes_any_text: bool
    return_range: ReturnRange
    is_game: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., version: _Optional[str] = ..., action_schema_json: _Optional[bytes] = ..., observation_schema_json: _Optional[bytes] = ..., state_schema_json: _Optional[bytes] = ..., has_text_view: _Optional[bool] = ..., max_sessions: _Optional[int] = ..., options_json: _Optional[bytes] = ..., reset_options: _Optional[_Iterable[str]] = ..., takes_any_option: _Optional[bool] = ..., is_deterministic: _Optional[bool] = ..., tools_json: _Optional[bytes] = ..., server_id: _Optional[str] = ..., linger_s: _Optional[float] = ..., idle_timeout_s: _Optional[float] = ..., tasks: _Optional[_Union[TaskSet, _Mapping]] = ..., takes_any_text: _Optional[bool] = ..., return_range: _Optional[_Union[ReturnRange, _Mapping]] = ..., is_game: _Optional[bool] = ...) -> None: ...

class ResetArgs(_message.Message):
    __slots__ = ("seed", "episode_id", "options_json")
    SEED_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    seed: int
    episode_id: str
    options_json: bytes
    def __init__(self, seed: _Optional[int] = ..., episode_id: _Optional[str] = ..., options_json: _Optional[bytes] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("reset", "close_when_done", "session_id", "linger_s", "without_text")
    RESET_FIELD_NUMBER: _ClassVar[int]
    CLOSE_WHEN_DONE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LINGER_S_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    reset: ResetArgs
    close_when_done: bool
    session_id: str
    linger_s: float
    without_text: bool
    def __init__(self, reset: _Optional[_Union[ResetArgs, _Mapping]] = ..., close_when_done: _Optional[bool] = ..., session_id: _Optional[str] = ..., linger_s: _Optional[float] = ..., without_text: _Optional[bool] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("session_id", "first", "tools_session_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOOLS_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    first: StepResult
    tools_session_id: str
    def __init__(self, session_id: _Optional[str] = ..., first: _Optional[_Union[StepResult, _Mapping]] = ..., tools_session_id: _Optional[str] = ...) -> None: ...

class OpenGroupRequest(_message.Message):
    __slots__ = ("open", "size", "session_ids")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    open: OpenRequest
    size: int
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, open: _Optional[_Union[OpenRequest, _Mapping]] = ..., size: _Optional[int] = ..., session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenGroupResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[OpenResponse]
    def __init__(self, sessions: _Optional[_Iterable[_Union[OpenResponse, _Mapping]]] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("session_id", "args")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    args: ResetArgs
    def __init__(self, session_id: _Optional[str] = ..., args: _Optional[_Union[ResetArgs, _Mapping]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session_id", "step_index", "action_json", "action_text", "tensors", "timeout_s", "attempt_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    ACTION_JSON_FIELD_NUMBER: _ClassVar[int]
    ACTION_TEXT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step_index: int
    action_json: bytes
    action_text: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    timeout_s: float
    attempt_id: int
    def __init__(self, session_id: _Optional[str] = ..., step_index: _Optional[int] = ..., action_json: _Optional[bytes] = ..., action_text: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., timeout_s: _Optional[float] = ..., attempt_id: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("session_id", "step_index", "observation_json", "reward", "terminated", "truncated", "info_json", "tensors", "text", "metadata_json", "success")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_JSON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step_index: int
    observation_json: bytes
    reward: float
    terminated: bool
    truncated: bool
    info_json: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    text: TextView
    metadata_json: bytes
    success: bool
    def __init__(self, session_id: _Optional[str] = ..., step_index: _Optional[int] = ..., observation_json: _Optional[bytes] = ..., reward: _Optional[float] = ..., terminated: _Optional[bool] = ..., truncated: _Optional[bool] = ..., info_json: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., text: _Optional[_Union[TextView, _Mapping]] = ..., metadata_json: _Optional[bytes] = ..., success: _Optional[bool] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class StateResponse(_message.Message):
    __slots__ = ("session_id", "state_json")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_JSON_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    state_json: bytes
    def __init__(self, session_id: _Optional[str] = ..., state_json: _Optional[bytes] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CallToolRequest(_message.Message):
    __slots__ = ("session_id", "name", "arguments_json")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    arguments_json: bytes
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[bytes] = ...) -> None: ...

class CallToolResponse(_message.Message):
    __slots__ = ("session_id", "result_json", "reward", "terminated", "truncated", "success")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    result_json: bytes
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    def __init__(self, session_id: _Optional[str] = ..., result_json: _Optional[bytes] = ..., reward: _Optional[float] = ..., terminated: _Optional[bool] = ..., truncated: _Optional[bool] = ..., success: _Optional[bool] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("server_id", "num_sessions", "max_sessions", "num_waiting", "is_draining")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    num_sessions: int
    max_sessions: int
    num_waiting: int
    is_draining: bool
    def __init__(self, server_id: _Optional[str] = ..., num_sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., num_waiting: _Optional[int] = ..., is_draining: _Optional[bool] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("traceparent", "request_id")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    request_id: str
    def __init__(self, traceparent: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "session_id", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    session_id: str
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., session_id: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("call_id", "open", "reset", "step", "state", "close", "open_group", "call_tool", "detach", "trace")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    OPEN_GROUP_FIELD_NUMBER: _ClassVar[int]
    CALL_TOOL_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    open: OpenRequest
    reset: ResetRequest
    step: StepRequest
    state: StateRequest
    close: CloseRequest
    open_group: OpenGroupRequest
    call_tool: CallToolRequest
    detach: DetachRequest
    trace: Trace
    def __init__(self, call_id: _Optional[int] = ..., open: _Optional[_Union[OpenRequest, _Mapping]] = ..., reset: _Optional[_Union[ResetRequest, _Mapping]] = ..., step: _Optional[_Union[StepRequest, _Mapping]] = ..., state: _Optional[_Union[StateRequest, _Mapping]] = ..., close: _Optional[_Union[CloseRequest, _Mapping]] = ..., open_group: _Optional[_Union[OpenGroupRequest, _Mapping]] = ..., call_tool: _Optional[_Union[CallToolRequest, _Mapping]] = ..., detach: _Optional[_Union[DetachRequest, _Mapping]] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("call_id", "error", "open", "result", "state", "close", "open_group", "call_tool")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    OPEN_GROUP_FIELD_NUMBER: _ClassVar[int]
    CALL_TOOL_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    error: Error
    open: OpenResponse
    result: StepResult
    state: StateResponse
    close: CloseResponse
    open_group: OpenGroupResponse
    call_tool: CallToolResponse
    def __init__(self, call_id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., open: _Optional[_Union[OpenResponse, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., state: _Optional[_Union[StateResponse, _Mapping]] = ..., close: _Optional[_Union[CloseResponse, _Mapping]] = ..., open_group: _Optional[_Union[OpenGroupResponse, _Mapping]] = ..., call_tool: _Optional[_Union[CallToolResponse, _Mapping]] = ...) -> None: ...

class CallBatch(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    def __init__(self, calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ...) -> None: ...

class ReplyBatch(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    def __init__(self, replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ...) -> None: ...
