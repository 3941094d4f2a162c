"""Write the steps of a run with the W&B sink in offline mode.

python -m tests.sinks.wandb_program FOLDER FIRST_STEP LAST_STEP
"""

import sys
from pathlib import Path

from ludus.trainer.run.sinks import open_sinks
from tests.sinks.mixed_run import make_run_config, make_step_rows

if __name__ == "__main__":
    folder, first_step, last_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sinks = open_sinks(make_run_config(wandb={"mode": "offline"}), folder)
    for step in range(first_step, last_step + 1):
        for row in make_step_rows(step):
            sinks.write(row)
    sys.stdout.write(f"{len(sinks)}\n")
    sinks.close()
