"""Each actor sees exactly the GPUs that it requests, in a real Ray with fake GPUs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, sys
os.environ |= {"CUDA_VISIBLE_DEVICES": "0,1", "RAY_USAGE_STATS_ENABLED": "0"}
if sys.argv[1] == "noset":
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
import ray
from ludus.trainer.actors.gpus import limit_visible_gpus

class Actor:
    def __init__(self):
        limit_visible_gpus()
    def read_visible_gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

ray.init(num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
actor_class = ray.remote(Actor)
actors = [actor_class.options(num_gpus=n, num_cpus=0).remote() for n in (0, 1, 0.5, 0.5)]
print(json.dumps(ray.get([actor.read_visible_gpus.remote() for actor in actors])))
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", pytest.param("noset", marks=pytest.mark.long)])
def test_actors_see_only_the_gpus_that_they_request(mode: str) -> None:
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout
    no_gpu, *gpus = json.loads(output.splitlines()[-1])
    assert no_gpu == ""
    assert sorted(gpus) in (["0", "0", "1"], ["0", "1", "1"])
    assert gpus[1] == gpus[2] != gpus[0]
