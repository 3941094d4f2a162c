"""Results whose JSON is parsed on first access behave like StepResults."""

import copy
import dataclasses
import pickle

import pytest

from ludus.env.encoding import EncodedResult, EncodedText
from ludus.env.messages.protobuf import fill_result, read_result
from ludus.env.types import StepResult, TextView
from ludus.proto.env.v1 import env_pb2 as pb

MESSAGES = [{"role": "user", "content": "Total 3."}]
EAGER_RESULT = StepResult(
    observation={"total": 3},
    reward=1.5,
    truncated=True,
    info={"added": 2},
    step_index=4,
    text=TextView(MESSAGES, ["ADD 1"]),
)


def make_lazy_result(**changes) -> StepResult:
    encoded_result = EncodedResult(
        step_index=4,
        observation_json=b'{"total":3}',
        metadata_json=b"",
        info_json=b'{"added":2}',
        reward=1.5,
        terminated=False,
        truncated=True,
        tensors={},
        text=EncodedText(b'[{"role":"user","content":"Total 3."}]', ["ADD 1"]),
    )
    message = pb.StepResult()
    fill_result(message, "S", dataclasses.replace(encoded_result, **changes))
    return read_result(message)


def test_lazy_and_eager_results_are_equal_in_both_directions() -> None:
    lazy_result, eager_result = make_lazy_result(), EAGER_RESULT
    assert lazy_result == eager_result
    assert eager_result == lazy_result
    assert lazy_result == make_lazy_result()
    other_result = make_lazy_result(observation_json=b'{"total":4}')
    assert other_result != eager_result
    assert eager_result != other_result
    assert make_lazy_result(reward=2.0) != eager_result
    assert make_lazy_result() != "a result"


def test_lazy_fields_equal_eager_fields() -> None:
    for field in dataclasses.fields(StepResult):
        assert getattr(make_lazy_result(), field.name) == getattr(EAGER_RESULT, field.name)
    assert make_lazy_result().done
    assert repr(make_lazy_result()).removeprefix("Lazy") == repr(EAGER_RESULT)


def test_absent_fields_are_none_or_empty() -> None:
    lazy_result = make_lazy_result(info_json=b"", reward=None, text=None, truncated=False)
    assert (
        lazy_result.info,
        lazy_result.reward,
        lazy_result.text,
        lazy_result.tensors,
        lazy_result.done,
    ) == (
        {},
        None,
        None,
        {},
        False,
    )


def test_fields_are_parsed_once() -> None:
    lazy_result = make_lazy_result()
    assert lazy_result.observation is lazy_result.observation
    assert lazy_result.text is lazy_result.text
    assert lazy_result.info is lazy_result.info


def test_lazy_result_supports_pickle_copy_and_replace() -> None:
    assert pickle.loads(pickle.dumps(make_lazy_result())) == EAGER_RESULT
    assert copy.deepcopy(make_lazy_result()) == EAGER_RESULT
    assert dataclasses.replace(make_lazy_result(), reward=9.0) == dataclasses.replace(
        EAGER_RESULT, reward=9.0
    )
    assert dataclasses.asdict(make_lazy_result()) == dataclasses.asdict(EAGER_RESULT)


def test_lazy_result_is_frozen_and_has_no_unknown_attributes() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_lazy_result().reward = 2.0
    with pytest.raises(AttributeError, match="'rewards'"):
        make_lazy_result().rewards  # noqa: B018
