"""Classic PPO: torch modules that act on numbers, in Gymnasium's environments or a server's.

    VectorEnvironment --Playing--> episodes side by side --Collector--> Batch --PpoUpdate--> policy
      Gymnasium, or step_many                                             ^                    |
                                                                          +------ Agent <------+

An `Agent` is all of it without files: a program may use it alone, as `train_agent` does. A run of
`ludus train` (`run.py`) is an agent with a folder: rows, evaluations, checkpoints, a summary.
"""
