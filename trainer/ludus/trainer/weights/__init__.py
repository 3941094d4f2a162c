"""Weights on their way from the learner to the rollout workers.

store      versions: publishing, fetching, retention, time limits
payload    one version as bytes;  delta  as the difference from another version
folder, bucket (and actors/weight_store.py)  storage of the bytes
manifest   checksums;  canary  proof that a worker samples from the weights that it loaded
adapters   merging of adapters and base weights into the tensors that an engine loads
"""

from ludus.trainer.weights.canary import CanaryJudge, CanaryReport, WorkerWeights, check_canary
from ludus.trainer.weights.manifest import cast_floats, make_manifest, verify
from ludus.trainer.weights.store import VersionStore

__all__ = [
    "CanaryJudge",
    "CanaryReport",
    "VersionStore",
    "WorkerWeights",
    "cast_floats",
    "check_canary",
    "make_manifest",
    "verify",
]
