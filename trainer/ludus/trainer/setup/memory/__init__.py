"""The memory that a run needs, computed from its configuration before it starts.

    config.json --> ModelShape --+--> learner: bytes of a rank     --+
                                 +--> worker: bytes of a worker    --+--> plan: uses, refusals
    GPUs, main memory --> machine: bytes that there are            --+

docs/memory.md lists the formulas.
"""
