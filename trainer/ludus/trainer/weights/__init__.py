"""Weights from learner to sampler.

store      versions go in, versions come out: chains, retention, time limits
payload    one version as the bytes that travel;  delta  as the difference from another
folder, bucket (and actors/weight_store.py)  where the bytes lie
manifest   checksums;  canary  proof that a worker samples from what it loaded
adapters   adapters and base weights become the tensors that an engine loads
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
