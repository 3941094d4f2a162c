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

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("name", "description", "version", "action_schema_json", "observation_schema_json", "state_schema_json", "has_text_view", "max_sessions", "options_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTION_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    STATE_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    HAS_TEXT_VIEW_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    version: str
    action_schema_json: bytes
    observation_schema_json: bytes
    state_schema_json: bytes
    has_text_view: bool
    max_sessions: int
    options_json: bytes
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., version: _Optional[str] = ..., action_schema_json: _Optional[bytes] = ..., observation_schema_json: _Optional[bytes] = ..., state_schema_json: _Optional[bytes] = ..., has_text_view: _Optional[bool] = ..., max_sessions: _Optional[int] = ..., options_json: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("reset", "close_when_done")
    RESET_FIELD_NUMBER: _ClassVar[int]
    CLOSE_WHEN_DONE_FIELD_NUMBER: _ClassVar[int]
    reset: ResetArgs
    close_when_done: bool
    def __init__(self, reset: _Optional[_Union[ResetArgs, _Mapping]] = ..., close_when_done: _Optional[bool] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("session_id", "first")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    first: StepResult
    def __init__(self, session_id: _Optional[str] = ..., first: _Optional[_Union[StepResult, _Mapping]] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("session_id", "args")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    args: ResetArgs
    def __init__(self, session_id: _Optional[str] = ..., args: _Optional[_Union[ResetArgs, _Mapping]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session_id", "step_index", "action_json", "action_text", "tensors", "timeout_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    ACTION_JSON_FIELD_NUMBER: _ClassVar[int]
    ACTION_TEXT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step_index: int
    action_json: bytes
    action_text: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    timeout_s: float
    def __init__(self, session_id: _Optional[str] = ..., step_index: _Optional[int] = ..., action_json: _Optional[bytes] = ..., action_text: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("session_id", "step_index", "observation_json", "reward", "terminated", "truncated", "info_json", "tensors", "text")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_JSON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step_index: int
    observation_json: bytes
    reward: float
    terminated: bool
    truncated: bool
    info_json: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    text: TextView
    def __init__(self, session_id: _Optional[str] = ..., step_index: _Optional[int] = ..., observation_json: _Optional[bytes] = ..., reward: _Optional[float] = ..., terminated: _Optional[bool] = ..., truncated: _Optional[bool] = ..., info_json: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., text: _Optional[_Union[TextView, _Mapping]] = ...) -> None: ...

class StepManyRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepRequest]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepRequest, _Mapping]]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("result", "error")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    result: StepResult
    error: Error
    def __init__(self, result: _Optional[_Union[StepResult, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class StepManyResponse(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[StepReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[StepReply, _Mapping]]] = ...) -> None: ...

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

class Error(_message.Message):
    __slots__ = ("code", "message", "session_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    session_id: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("call_id", "open", "reset", "step", "state", "close")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    open: OpenRequest
    reset: ResetRequest
    step: StepRequest
    state: StateRequest
    close: CloseRequest
    def __init__(self, call_id: _Optional[int] = ..., open: _Optional[_Union[OpenRequest, _Mapping]] = ..., reset: _Optional[_Union[ResetRequest, _Mapping]] = ..., step: _Optional[_Union[StepRequest, _Mapping]] = ..., state: _Optional[_Union[StateRequest, _Mapping]] = ..., close: _Optional[_Union[CloseRequest, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("call_id", "error", "open", "result", "state", "close")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    error: Error
    open: OpenResponse
    result: StepResult
    state: StateResponse
    close: CloseResponse
    def __init__(self, call_id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., open: _Optional[_Union[OpenResponse, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., state: _Optional[_Union[StateResponse, _Mapping]] = ..., close: _Optional[_Union[CloseResponse, _Mapping]] = ...) -> None: ...

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
