"""What a loop's steps all make of what does not change: made once, before the first (WhileLoopInvariantCodeMotion).

JAX has moved most of that out already (`pcg.hoisting`). What is left is what the compiler itself adds to a step: conversions of
narrow numbers, above all, of everything that a step takes its slices of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unity.exec.liveness.kinds import COLLECTIVES
from unity.exec.liveness.program import Builder, Op, Program

# Not moved for themselves, but with what reads them.
UNWORTHY = frozenset({"bitcast", "broadcast", "constant", "iota", "reverse", "slice", "transpose"})
# Stay where they are; a collective's operand is laid out for it there.
BOUND = frozenset({"barrier", "while", "conditional", "rng", "relayout", *COLLECTIVES.values()})


@dataclass(frozen=True)
class Moved:
    """A step without what was moved: its program, what it now reads from outside first of all, and which of the values that it read
    from outside before, by position, it still does."""

    step: Program
    made: tuple[int, ...]
    left: tuple[int, ...]


def moved_out(b: Builder, step: Builder, body: Program, operands: Sequence[int], varying: Iterable[int]) -> Moved:
    """Moves out of `body`, which `step` built, what does not change from step to step, to `b`.

    The body's first input is the counter, the next ones are what `operands` are outside; `varying`: those that change, by position.
    What was moved becomes the body's inputs after the counter.
    """
    fixed = set(range(len(operands))) - set(varying)
    outside = {body.inputs[1 + p]: operands[p] for p in fixed}
    alike = set(outside)
    for op in body.ops:
        if op.kind not in BOUND and alike.issuperset(op.operands):
            alike.update(op.results)
    moving = {v for op in body.ops if op.kind not in UNWORTHY and alike.issuperset(op.results) for v in op.results}
    staying = [op for op in body.ops if moving.isdisjoint(op.results)]
    crossing = [v for v in dict.fromkeys((*(v for op in staying for v in op.operands), *body.outputs)) if v in moving]
    for v in crossing:
        _emitted(b, step, v, outside)
        del step.made[v]
    found = step.program([body.inputs[0], *crossing, *body.inputs[1:]], body.outputs)
    before, after = (_read(program) for program in (body, found))
    left = [p for p in range(len(operands)) if not (p in fixed and body.inputs[1 + p] in before - after)]
    gone = {body.inputs[1 + p] for p in range(len(operands)) if p not in left}
    inputs = tuple(v for v in found.inputs if v not in gone)
    return Moved(Program(found.ops, found.tensors, inputs, found.outputs), tuple(outside[v] for v in crossing), tuple(left))


def _emitted(b: Builder, step: Builder, v: int, outside: dict[int, int]) -> int:
    """A value of a step, made outside."""
    if v not in outside:
        op: Op = step.made[v]
        operands = [_emitted(b, step, w, outside) for w in op.operands]
        results = Builder.emit(b, op.kind, operands, [step.tensors[r] for r in op.results], op.params, op.origin, op.inside)
        outside.update(zip(op.results, results, strict=True))
    return outside[v]


def _read(program: Program) -> set[int]:
    return {v for op in program.ops for v in op.operands} | set(program.outputs)
