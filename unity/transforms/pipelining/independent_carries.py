"""Carries of a scan that depend on no samples, such as a counter of layers or a key that every layer splits.

    scan(step, (x, i), w)  =  scan(step', x, (w, is)), the last i,  where is are the values of i before each step

Such a carry has no part for each micro-batch. But its values follow from the start, constants and weights, so they are computed
ahead by a scan of their own, and steps read them as they read weights. A carry that no step changes becomes a constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax import lax

from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.ir.dead_code import ancestors, used
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.program import Body, Equation
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.local.interpreter import run_body
from unity.pcg.propagation.nested_programs import nested_body
from unity.transforms.splice import named, spliced, with_lines_of_scans, with_nodes, within

STEPPED = "unity:values by step"  # scope of the two scans; no model has it


@dataclass(frozen=True, eq=False)
class StepCarries:
    """The carries of a scan's step, and what they depend on.

    Attributes:
        step: the step's program.
        consts: the number of the scan's constants.
        carry: the number of its carries.
    """

    step: Body
    consts: int
    carry: int

    @cached_property
    def sources(self) -> list[set[int]]:
        """For each carry the carries, by number, that it depends on after any number of steps; itself included."""
        numbers = {v: k for k, v in enumerate(self.step.inputs[self.consts : self.consts + self.carry])}
        reached = [{k} for k in range(self.carry)]
        for k, a in enumerate(self.step.outputs[: self.carry]):
            reached[k] |= {numbers[v] for v in (ancestors(self.step, [a]) if isinstance(a, int) else ()) if v in numbers}
        while True:
            grown = [set[int]().union(*(reached[j] for j in some)) for some in reached]
            if grown == reached:
                return reached
            reached = grown

    def shape(self, k: int) -> tuple[int, ...]:
        """Return the shape of a carry."""
        return self.step.tensors[self.step.inputs[self.consts + k]].shape

    def independent(self, size: int) -> list[int]:
        """Return the carries, by number, that depend on none with a dimension of `size` samples."""
        return [k for k, some in enumerate(self.sources) if all(size not in self.shape(j) for j in some)]

    def apart(self, size: int) -> tuple[Body, int]:
        """Return the step with independent carries among its constants, and not among its results, and the number of constants."""
        first, end, step = self.consts, self.consts + self.carry, self.step
        independent = self.independent(size)
        others = [k for k in range(self.carry) if k not in independent]
        order = (*range(first), *(first + k for k in (*independent, *others)), *range(end, len(step.inputs)))
        inputs, outputs = (step.inputs[p] for p in order), (step.outputs[k] for k in others)
        return used(replace(step, inputs=tuple(inputs), outputs=tuple(outputs))), first + len(independent)

    def is_unchanged(self, k: int) -> bool:
        """Return whether no step changes a carry."""
        return self.step.outputs[k] == self.step.inputs[self.consts + k]


def carries_of(e: Equation) -> StepCarries:
    """Return the carries of a scan."""
    return StepCarries(nested_body(e), *constants_and_carry(e.params))


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of a scan's step: the program of some carries.

    Attributes:
        carries: all carries of the scan.
        numbers: the carries that the part computes.
        body: the program, of those inputs of the step that it reads.
        read: these inputs, by position.
    """

    carries: StepCarries
    numbers: Sequence[int]
    body: Body
    read: Sequence[int]

    @classmethod
    def of(cls, carries: StepCarries, numbers: Sequence[int]) -> _Part:
        """Return the part of a step that computes these carries."""
        step = carries.step
        body = used(replace(step, outputs=tuple(step.outputs[k] for k in numbers)))
        atoms = {a for a in (*body.outputs, *(a for e in body.equations for a in e.operands)) if isinstance(a, int)}
        read = [p for p, v in enumerate(step.inputs) if v in atoms]
        return cls(carries, numbers, replace(body, inputs=tuple(step.inputs[p] for p in read)), read)

    def scanned(
        self, operands: Sequence[Any], known: Mapping[int, Any], length: int, unroll: int, stacked: bool
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Scan the part over all steps. Return its carries after the last step and, if `stacked`, before each step, by number.

        `operands` are those of the whole scan, `known` the values of other carries before each step, by number.
        """
        consts, mine = self.carries.consts, [self.carries.consts + k for k in self.numbers]
        stacks = {consts + k: x for k, x in known.items()}
        stacks |= {p: operands[p] for p in range(consts + self.carries.carry, len(operands))}
        sliced = [p for p in self.read if p in stacks]
        types: list[tuple] = [()] * max(len(self.read), len(mine))  # no axis divides anything here

        def one(carried: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
            values = dict(zip((*sliced, *mine), (*rows, *carried), strict=True))
            read = [values[p] if p in values else operands[p] for p in self.read]
            return run_body(self.body, read, types[: len(read)], types[: len(mine)], ()), carried if stacked else []

        start, rows = [operands[p] for p in mine], [stacks[p] for p in sliced]
        last, before = lax.scan(one, start, rows, length, unroll=unroll)
        return dict(zip(self.numbers, last, strict=True)), dict(zip(self.numbers if stacked else (), before, strict=True))


def with_values_by_step(captured: Captured, number: int, size: int) -> Captured:
    """Return the program in which the steps of a scan, given by its equation's number, read its independent carries as inputs.

    Those are all that depend on no carry with a dimension of `size`.
    """
    e = captured.body.equations[number]
    carries = carries_of(e)
    independent = carries.independent(size)
    others = [k for k in range(carries.carry) if k not in independent]
    ahead = _Part.of(carries, [k for k in independent if not carries.is_unchanged(k)])
    layers = _Part.of(carries, others)

    def program(*operands: Any) -> Sequence[Any]:
        final = dict(enumerate(operands[carries.consts : carries.consts + carries.carry]))
        length, unroll = e.params["length"], e.params["unroll"]
        last, known = ahead.scanned(operands, {}, length, 1, stacked=True) if ahead.numbers else ({}, {})
        final |= last | layers.scanned(operands, known, length, unroll, stacked=False)[0]
        return [final[k] for k in range(carries.carry)]

    traced = trace(program, (captured.body.tensor(a).struct for a in e.operands), carries.step.tensors.values())
    after = captured.of(spliced(captured.body, set(e.results), e.operands, e.results, traced, e, STEPPED), captured.bodies)
    graph = with_lines_of_scans(after.graph, captured.graph)
    return replace(after, graph=_with_lines(graph, e.source, (ahead.body, layers.body)))


def _with_lines(graph: PCG, source: str, steps: Sequence[Body]) -> PCG:
    """Return a graph with the lines of these steps in the scans that were made from them at a line."""
    changed = {}
    for node in graph.nodes:
        if node.kind == "scan" and within(node.scope, STEPPED) and node.source == source and node.inside is not None:
            inside = node.inside
            for step in steps:
                inside = named(inside, graph_of(step, [f"operand {p}" for p in range(len(step.inputs))]))
            changed[id(node)] = replace(node, inside=inside)
    return with_nodes(graph, changed)


def is_ahead(e: Equation) -> bool:
    """Return whether a scan computes values of carries ahead, for another: it returns the values before each step."""
    return within(e.scope, STEPPED) and len(e.results) > constants_and_carry(e.params)[1]
