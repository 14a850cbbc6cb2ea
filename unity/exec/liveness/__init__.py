"""Peak memory by liveness: the step as it will run, in the order in which it will run, and what is held when.

    found = timeline(plan.pcg, weights, ends, backend, slots=2)
    found.peak, found.held, found.nbytes

The step is traced (`trace`), said in the compiler's operations (`lower`, `rules`), what does not change is moved out of loops
(`invariant`), the rest fused to kernels (`library`, `fusion`, `emitted`), given copies of what is written in place (`copies`),
ordered (`schedule`), and its buffers are put in memory (`buffers`, `packing`).
Each does what a pass of XLA does, as `compiled.as_text()` and the buffer assignment show; nothing is compiled, no device is needed.
"""

from unity.exec.liveness.step import plan_timeline, timeline
from unity.exec.liveness.timeline import Held, MemoryTimeline

__all__ = ["Held", "MemoryTimeline", "plan_timeline", "timeline"]
