"""What several processes run for tests/plan/test_checkpoints.py: `checkpoint_worker.py FROM TO ADDRESS PROCESSES PROCESS`.

Restores a checkpoint under a plan for all processes, takes a step, and saves another. Prints the step's loss.
"""

import sys
from pathlib import Path

import jax
from checkpoint_cases import batch, planned, restored, saved, step_of

from benchmarks.processes import join


def main() -> None:
    join()
    plan = planned(jax.process_count(), jax.local_device_count(), lean=True)
    state = restored(plan, Path(sys.argv[1]))
    state, loss = step_of(plan)(state, plan.shard(plan.shard(state[0]), batch(2))[1])
    saved(state, Path(sys.argv[2]))
    print(float(loss))


if __name__ == "__main__":
    main()
