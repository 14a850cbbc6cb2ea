"""Carries of a scan that depend on no samples, such as a counter of layers or a key that every layer splits.

    scan(step, (x, i), w)  =  scan(step', x, (w, i_before)), i_last        where i_before stacks the value of i before each step

Such a carry cannot be split into micro-batches. But its values depend on its initial value, constants and weights alone, so a
separate scan computes them ahead, and steps read them as they read weights. A carry that no step changes becomes a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice
from typing import Any

from jax import lax

from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.payloads import Scan
from unity.pcg.ir.program import Body, Equation
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.local.interpreter import run_body
from unity.pcg.propagation.nested.programs import nested_body
from unity.transforms.chosen_results import inputs_read, with_results
from unity.transforms.splice import aligned, spliced, with_lines_of_scans, with_nodes, within

STEPPED = "unity:values by step"  # scope of the two scans; no model has it
CHOICES = 16  # combinations of carries that are taken for those with a dimension of samples, before duplicates are dropped


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
        mine = range(self.consts, self.consts + self.carry)
        reached = [
            {k, *(p - self.consts for p in inputs_read(with_results(self.step, [k])) if p in mine)} for k in range(self.carry)
        ]
        while True:
            grown = [set[int]().union(*(reached[j] for j in some)) for some in reached]
            if grown == reached:
                return reached
            reached = grown

    def shape(self, k: int) -> tuple[int, ...]:
        """Return the shape of a carry."""
        return self.step.tensors[self.step.inputs[self.consts + k]].shape

    def sample_carry_candidates(self, size: int) -> Iterator[list[int]]:
        """Yield sets of carries, by number, that may be all with samples, if there are `size`.

        Each has some carries with a dimension of that size, and all that depend on them. Larger sets come first, as the dimension
        may be one of features.
        """
        sized = [k for k in range(self.carry) if size in self.shape(k)]
        chosen = (set(some) for n in range(len(sized), 0, -1) for some in combinations(sized, n))
        sets = (tuple(k for k, of in enumerate(self.sources) if not of.isdisjoint(some)) for some in chosen)
        yield from (list(some) for some in dict.fromkeys(islice(sets, CHOICES)))

    def independent(self, size: int) -> list[int]:
        """Return the carries, by number, that depend on none with a dimension of `size` samples."""
        sample_carries = next(self.sample_carry_candidates(size), [])
        return [k for k in range(self.carry) if k not in sample_carries]

    def with_constants(self, sample_carries: Sequence[int]) -> tuple[Body, int]:
        """Return the step that carries `sample_carries` alone and reads all others as constants, and the number of constants."""
        first, end, step = self.consts, self.consts + self.carry, self.step
        independent = [k for k in range(self.carry) if k not in sample_carries]
        order = (*range(first), *(first + k for k in (*independent, *sample_carries)), *range(end, len(step.inputs)))
        return replace(with_results(step, sample_carries), inputs=tuple(step.inputs[p] for p in order)), first + len(independent)

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
        body = with_results(carries.step, numbers)
        places = inputs_read(body)
        return cls(carries, numbers, replace(body, inputs=tuple(body.inputs[p] for p in places)), places)

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


def with_values_by_step(captured: Captured, number: int, sample_carries: Sequence[int]) -> Captured:
    """Return the program in which a scan carries `sample_carries` alone, and reads the values of its other carries.

    A second scan computes these ahead, so that they must not depend on `sample_carries`.

    Args:
        captured: the program.
        number: the number of the scan's equation. The scan runs forward and returns its carries alone.
        sample_carries: the carries, by number, that may have samples.
    """
    e = captured.body.equations[number]
    carries = carries_of(e)
    independent = [k for k in range(carries.carry) if k not in sample_carries]
    ahead = _Part.of(carries, [k for k in independent if not carries.is_unchanged(k)])
    layers = _Part.of(carries, sample_carries)

    def program(*operands: Any) -> Sequence[Any]:
        final = dict(enumerate(operands[carries.consts : carries.consts + carries.carry]))
        length, unroll = e.params["length"], e.params["unroll"]
        last, known = ahead.scanned(operands, {}, length, 1, stacked=True) if ahead.numbers else ({}, {})
        final |= last | layers.scanned(operands, known, length, unroll, stacked=False)[0]
        return [final[k] for k in range(carries.carry)]

    traced = trace(program, (captured.body.tensor(a).struct for a in e.operands), carries.step.tensors.values())
    after = captured.of(spliced(captured.body, set(e.results), e.operands, e.results, traced, e, STEPPED), captured.bodies)
    graph = with_lines_of_scans(after.graph, captured.graph)
    return replace(after, graph=_with_lines(graph, e.source, ahead.body, layers.body))


def _with_lines(graph: PCG, source: str, ahead: Body, layers: Body) -> PCG:
    """Return a graph with the lines of these steps in the scans that were made from them at a line.

    Their operators may differ a little: JAX's `cond`, for example, computes another index when it is traced again.
    """
    changed = {}
    for node in graph.nodes:
        if node.kind == "scan" and within(node.scope, STEPPED) and node.source == source and node.inside is not None:
            step = ahead if len(node.tensors) > node.of(Scan).carry else layers
            before = graph_of(step, [f"operand {p}" for p in range(len(step.inputs))])
            changed[id(node)] = replace(node, inside=aligned(node.inside, before))
    return with_nodes(graph, changed)


def is_ahead(e: Equation) -> bool:
    """Return whether a scan computes values of carries ahead, for another: it returns the values before each step."""
    return within(e.scope, STEPPED) and len(e.results) > constants_and_carry(e.params)[1]
