"""What the compiled program really does, against what the plan says: collectives by kind, bytes, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import jax

from unity.exec.compiled.agreement import Disagreement, argument_labels, disagreements
from unity.exec.compiled.hlo import Memory, collectives, memory
from unity.exec.liveness import MemoryTimeline, plan_timeline
from unity.exec.liveness.trace import gradient_step
from unity.exec.lowering import platform_of
from unity.exec.pipelines.guarded import part_taken
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.ir.graph import PCG
from unity.pcg.jaxprs.mesh_context import apart
from unity.pcg.parallel.pipeline_cut import undrained
from unity.pcg.parallel.traffic import FORWARD, traffic
from unity.search.memory.backend import CPU, GPU
from unity.search.memory.memory import MemoryPrediction, predict_memory

if TYPE_CHECKING:
    from unity.plan.plan import Plan


LEFT_OUT = ("cpu-all-reduce-combiner", "cse_barrier_expander", "small-while-loop-hoisting")  # passes of the CPU backend


@dataclass(frozen=True)
class Line:
    """One kind of collective, or of memory: elements or bytes on one device in one step, predicted and compiled."""

    kind: str
    predicted: int
    compiled: int

    @property
    def difference(self) -> float:
        """(compiled - predicted) / the larger of both."""
        return (self.compiled - self.predicted) / max(self.compiled, self.predicted, 1)


@dataclass(frozen=True)
class Check:
    """A plan against its compiled program. Elements, because CPU backends widen bfloat16 collectives."""

    lines: tuple[Line, ...]
    memory: Memory
    predicted: MemoryPrediction  # as the search adds it up
    timeline: MemoryTimeline  # as the step is laid in memory
    disagreements: tuple[Disagreement, ...] = ()  # collectives that not all of their devices surely reach: they may hang

    @property
    def total(self) -> Line:
        """All kinds together."""
        return Line("all", sum(line.predicted for line in self.lines), sum(line.compiled for line in self.lines))

    def agrees(self, tolerance: float = 0.02) -> bool:
        """Whether every kind, and the total, agree within `tolerance` of the total, and all devices reach every collective."""
        if self.disagreements:
            return False
        room = tolerance * max(self.total.compiled, self.total.predicted, 1)
        return all(abs(line.compiled - line.predicted) <= room for line in (*self.lines, self.total))

    def __str__(self) -> str:
        rows = [f"{'collective':20} {'predicted':>14} {'compiled':>14}  (elements on one device)"]
        lines = (*self.lines, self.total)
        rows += [f"{line.kind:20} {line.predicted:14,} {line.compiled:14,}  {line.difference:+.1%}" for line in lines]
        rows.append(f"{'memory':20} {'predicted':>14} {'compiled':>14}  (bytes on one device, without the optimizer's)")
        lines = (*self.memory_lines, self.searched)
        rows += [f"{line.kind:20} {line.predicted:14,} {line.compiled:14,}  {line.difference:+.1%}" for line in lines]
        rows += [f"may hang, not all devices reach it: {found}" for found in self.disagreements]
        return "\n".join(rows)

    __repr__ = __str__

    @property
    def memory_lines(self) -> tuple[Line, ...]:
        """Bytes on one device in one step, which knows no optimizer: arguments, outputs, temporaries, and all together."""
        found, compiled = self.timeline, self.memory
        return (
            Line("arguments", found.arguments, compiled.arguments),
            Line("outputs", found.outputs, compiled.outputs - compiled.aliased),
            Line("temporaries", found.temporaries, compiled.temporaries),
            Line("all", found.step, compiled.total),
        )

    @property
    def searched(self) -> Line:
        """All bytes of a step as the search adds them up, from the parallel graph alone."""
        return Line("all, searched", round(self.predicted.step), self.memory.total)


def predicted_elements(graph: PCG, differentiated: Any, direction: str | None = None) -> Mapping[str, int]:
    """Elements of every kind of collective in one step, on one device; equal ones of one value count once, as XLA runs them, but
    for those that the backward pass makes again for a single reader."""
    found: Counter[str] = Counter()
    shared: Counter[Hashable] = Counter()
    for c in traffic(graph, differentiated):
        if direction in (None, c.direction):
            common = c.count - c.alone
            found[c.kind] += c.elements * (c.alone + max(0, common - shared[c.name]))
            if c.name is not None:
                shared[c.name] = max(shared[c.name], common)
    return found


def compile_step(plan: Plan, gradient: bool) -> Any:
    """The compiled program of one step: the function, and with `gradient` its weights' gradients. Nothing is allocated."""
    captured = plan._made.captured
    shardings = plan._shardings
    leaves = [
        jax.ShapeDtypeStruct(n.tensors[0].shape, n.tensors[0].dtype, sharding=s)
        for n, s in zip(plan.serial.inputs, shardings, strict=True)
    ]
    run = plan._program
    if not gradient:
        with apart():
            return jax.jit(run).lower(*leaves).compile(compiler_options=compiler_options(platform_of(plan.mesh)))
    if undrained(plan.serial):
        return plan.stream.compiled(compiler_options(platform_of(plan.mesh)))
    weights = sorted(k for k in captured.differentiated if plan.serial.inputs[k].tensors[0].floating)
    ends = losses(plan.serial)

    step = gradient_step(run, len(leaves), weights, ends)
    chosen, others = [leaves[k] for k in weights], [x for k, x in enumerate(leaves) if k not in weights]
    with apart():
        return jax.jit(step).lower(chosen, others).compile(compiler_options=compiler_options(platform_of(plan.mesh)))


def compiler_options(platform: str | None = None) -> dict[str, str | bool]:
    """What programs are compiled with to be compared. Default: for the devices of this process.

    Three passes of the CPU backend are left out. One joins all-reduces, and so keeps all gradients alive at once. One drops
    `jax.checkpoint`'s barriers, after which what is to be computed again is kept (design section 9). And one hands small loops
    to an emitter that knows no barriers, and ends the process."""
    platform = platform or jax.devices()[0].platform
    return {"xla_disable_hlo_passes": ",".join(LEFT_OUT)} if platform == CPU.name else {}


def compare(plan: Plan, gradient: bool, compiled: Any = None) -> Check:
    """Compares one step of a plan, compiled here unless it is given, with the prediction."""
    compiled = compiled or compile_step(plan, gradient)
    found: dict[str, Fraction] = {}
    text = compiled.as_text()
    for c in collectives(text):
        found[c.kind] = found.get(c.kind, Fraction(0)) + c.elements * c.count * part_taken(c.op_name)
    captured = plan._made.captured
    differentiated = captured.differentiated if gradient else ()
    predicted = predicted_elements(plan.pcg, differentiated, None if gradient else FORWARD)
    kinds = sorted({*found, *predicted})
    lines = tuple(Line(k, int(predicted.get(k, 0)), round(found.get(k, 0))) for k in kinds)
    training = replace(plan._made.search.training, backward=gradient)
    backend = CPU if platform_of(plan.mesh) == CPU.name else GPU
    searched = predict_memory(plan.pcg, differentiated, training, backend)
    parted = tuple(disagreements(text, argument_labels(compiled)))
    return Check(lines, memory(compiled), searched, plan_timeline(plan, gradient, backend), parted)
