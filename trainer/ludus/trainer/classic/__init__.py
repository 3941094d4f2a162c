"""Classic PPO: torch modules with numeric observations, trained in one process.

    VectorEnvironment --ParallelEpisodes--> NetworkBatch --> PpoUpdate --> policy
      Gymnasium, or a server                                                   |
                                    ^                                          |
                                    +-------------- PpoAgent <-----------------+

A `PpoAgent` trains without files, for use in programs. A run of `ludus train` (`run.py`) adds the
run folder: metrics, evaluations, checkpoints and the summary.
"""
