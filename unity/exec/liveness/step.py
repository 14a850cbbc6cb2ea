"""The memory of one step: every pass over it in turn, and who holds what at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unity.exec.liveness.buffers import Buffer, assigned
from unity.exec.liveness.copies import tasks
from unity.exec.liveness.rules import lowered
from unity.exec.liveness.timeline import GAPS, WORKED_ON, Held, MemoryTimeline
from unity.exec.liveness.trace import streamed, traced
from unity.exec.lowering import AT, label
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.pipeline_cut import undrained
from unity.search.memory.backend import Backend, backend_of
from unity.search.space.live_buffers import AGAIN, ARGUMENTS, FLIGHT, GRADIENTS, KEPT, RESULTS, SLOTS

if TYPE_CHECKING:
    from unity.plan.plan import Plan

POINTER = 8  # bytes in the table of results, one for each


def plan_timeline(plan: Plan, gradient: bool = True, backend: Backend | None = None) -> MemoryTimeline:
    """The memory of a plan's step, on the backend of the machine that it was planned for unless another is given."""
    inputs, training = plan.serial.inputs, plan._made.search.training
    weights = [k for k in sorted(plan._made.captured.differentiated) if inputs[k].tensors[0].floating] if gradient else []
    slots = training.optimizer_slots if gradient and training.backward else 0
    return timeline(plan.pcg, weights, losses(plan.serial), backend or backend_of(plan.machine), slots)


def timeline(graph: PCG, weights: Sequence[int], ends: Sequence[int], backend: Backend, slots: int = 0) -> MemoryTimeline:
    """The memory of one step of a parallel graph: its results and, if `weights` are given, the gradients of the sum of its results
    at `ends` for those inputs. `slots`: how many values of an optimizer each weight has."""
    flies = bool(weights) and undrained(graph)
    program = lowered(streamed(graph, weights) if flies else traced(graph, weights, ends), backend)
    found = assigned(tasks(program, backend.library, backend.eager), backend.eager)
    lines = {label(node): node.source for node, _ in graph.walk() if node.source}
    arguments = sum(program.tensors[v].nbytes for v in program.inputs)
    flight = sum(program.tensors[v].nbytes for v in program.outputs[len(weights) + len(graph.outputs) :]) if flies else 0
    outputs = sum(program.tensors[v].nbytes for v in program.outputs) - flight  # which lies in the place of the one before
    table = POINTER * len(program.outputs) if len(program.outputs) > 1 and backend.eager else 0
    held = found.held()
    moment = int(held.argmax()) if len(held) else 0
    gradients = sum(program.tensors[v].nbytes for v in program.outputs[: len(weights)])
    then = [Held(ARGUMENTS, "", "", arguments - flight), Held(FLIGHT, "", "", flight)]
    then += [Held(GRADIENTS, "", "", gradients), Held(RESULTS, "", "", outputs - gradients)]
    then += [Held(SLOTS, "", "", slots * gradients)]
    then += [_held(b, lines) for b in found.temporary if b.start <= moment <= b.end]
    gaps = found.packed - (int(held[moment]) if len(held) else 0)
    then += [Held(GAPS, "", "", gaps)]
    return MemoryTimeline(
        tuple(sorted((h for h in then if h.nbytes), key=lambda h: -h.nbytes)),
        held + arguments + outputs,
        moment,
        arguments,
        outputs + table,
        found.packed,
        slots * gradients,
    )


def _held(buffer: Buffer, lines: Mapping[str, str]) -> Held:
    """Why a buffer is held: the forward pass makes it and the backward pass reads it, or it is made once more, or for a moment."""
    made, reader = buffer.origin, buffer.reader
    why = AGAIN if made.again else KEPT if reader.backward and not made.backward else WORKED_ON
    operator, _, where = made.label.partition(AT)
    return Held(why, operator or buffer.kind, lines.get(made.label, where), buffer.nbytes)
