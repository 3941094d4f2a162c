"""Write the steps of a run to W&B offline: `wandb_program.py FOLDER FIRST LAST`."""

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
