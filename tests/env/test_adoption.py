"""Sessions that linger become those of the next connection that calls them."""

from counting_env import CountingEnv

from ludus.env.adoption import adopt_called
from ludus.env.core import SessionCore
from ludus.env.encoding import ResetArgs
from ludus.env.hosts import local_host
from ludus.env.recording import RecordingSessions
from ludus.env.sessions import OpenArgs, Owner
from ludus.proto.env.v1 import env_pb2 as pb


async def test_every_call_of_an_orphan_adopts_it_and_an_open_or_an_empty_call_none(tmp_path):
    core = SessionCore(local_host(CountingEnv))
    recording = RecordingSessions(core, tmp_path)
    first, second = Owner(), Owner()
    kinds = ("step", "reset", "state", "call_tool", "detach", "close")
    opening = OpenArgs(ResetArgs(seed=1), linger_s=9)
    ids = [(await core.open(opening, first)).session_id for _ in (*kinds, "open")]
    core.release(first)
    assert recording.orphans == set(ids)
    calls = [pb.Call()]
    for kind, session_id in zip((*kinds, "open"), ids, strict=True):
        calls.append(pb.Call())
        getattr(calls[-1], kind).session_id = session_id
    adopt_called(recording, calls, second)
    assert second.session_ids == set(ids[:-1])
    assert core.orphans == {ids[-1]}
    recording.finish()
