"""Which seeds are for what, by all who draw or read them.

    0 ............ 2**30 ............. 2**31 ...............
    training       warm start          evaluation, test tasks

Where tasks are rows of a data set, seed n below 2**31 is the n-th task of training, and seed
2**31 + n the n-th of those that are held back.
"""

from __future__ import annotations

FIRST_WARM_START_SEED = 2**30
"""Below are the seeds of training."""
FIRST_EVAL_SEED = 2**31
"""Below are the seeds of training and of the warm start."""
