"""The option of XLA with which more of the communication in a plan's loops is hidden, as the plan's simulation assumes.

XLA overlaps within one step of a loop. What a step begins with, such as a gather of weights, and what it ends with, such as a sum
of gradients, has little beside it that it could hide behind. In a loop that is unrolled by two, the end of one step is beside
the beginning of the next (`benchmarks/schedules.py`).
"""

from __future__ import annotations

from unity.exec.tied_gradients import LATE_OVERHEAD
from unity.plan.planned_program import PlannedProgram
from unity.search.memory.backend import backend_of
from unity.search.simulator.program import Communication, ProgramLoop, program_of

DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
# Memory with double-buffered loops, relative to that without: 0.88 to 1.26 in `benchmarks/schedules.py`.
OVERHEAD = 1.4


def loop_options(program: PlannedProgram) -> dict[str, str | bool]:
    """Return the option for a plan with collectives in loops that leaves the memory for double buffering; else nothing."""
    search = program.family.search
    memory = OVERHEAD * (1 if program.ties_gradients else LATE_OVERHEAD) * program.candidate.memory
    if not backend_of(search.machine).overlaps or memory > program.memory_limit:
        return {}
    step = program_of(program.pcg, search.machine, program.family.differentiated, program.prediction, search.training.state)
    loops = (i.action for i in step.instructions if isinstance(i.action, ProgramLoop))
    return {DOUBLE_BUFFERING: True} if any(loop.program.has(Communication) for loop in loops) else {}
