"""The purposes of seeds.

    0 ............ 2**30 ............. 2**31 ...............
    training       warm start          evaluation, test tasks

If tasks are rows of a data set, seed n below 2**31 is the n-th training task, and seed 2**31 + n
is the n-th test task.
"""

from __future__ import annotations

FIRST_WARM_START_SEED = 2**30
"""First seed of the warm start. Training uses smaller seeds."""
FIRST_EVAL_SEED = 2**31
"""First seed of evaluations and test tasks. Training and the warm start use smaller seeds."""
