"""The cost of a piece of an operator that is a layer: the sum over the layer's own operators.

A layer's program has a product or a convolution among other equations. Neither a measured time nor a roofline is available for such
a program as a whole, and a roofline would let the product hide the memory traffic of the rest. So a layer takes as long as its
parts do one after the other, and a strategy of layers takes as long as the same strategy of their parts (except for gradients of
biases, which are summed when the whole layer has been computed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from unity.machine.machine import Machine
from unity.pcg.capture.clustering import clusters
from unity.pcg.capture.heavy_operators import constants, light
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.gradient_flow import carrying
from unity.pcg.ir.program import Body
from unity.pcg.propagation.choice import Choice, divided_by, part_of_work
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.propagation import Solution
from unity.search.cost.operator_seconds import seconds, single_piece

Cut = tuple[Choice, int]  # a way to split an operator, and the number of parts


@dataclass(frozen=True, eq=False)
class LayerPart:
    """One of a layer's operators: its program, and the layer's variables that it reads and produces."""

    body: Body
    reads: tuple[int, ...]
    makes: tuple[int, ...]


def is_layer(body: Body) -> bool:
    """Return whether an operator is a layer of several operators."""
    return len(parts(body)) > 1


@lru_cache(maxsize=4096)
def parts(body: Body) -> tuple[LayerPart, ...]:
    """Return the operators of which a layer consists; none if all its work is light."""
    if all(light(body, e) for e in body.equations):
        return ()
    constant, operators = constants(body), list[LayerPart]()
    for cluster in clusters(body, constant):
        part, reads = extract(body, cluster.members, cluster.outputs, constant)
        operators.append(LayerPart(part, reads, cluster.outputs))
    return tuple(operators)


def seconds_of(
    body: Body, cuts: Sequence[Cut], operands: Sequence[bool], results: Sequence[bool], machine: Machine
) -> tuple[float, float]:
    """Return the seconds forward and backward of one piece of a layer. `operands` and `results` say which have a gradient."""
    flows = carrying(body, tuple(operands), tuple(results))
    solved = [(_solution(body, choice), degree) for choice, degree in cuts]
    forward, backward = 0.0, 0.0
    for part in parts(body):
        share = prod(_share(body, part, solution, degree) for solution, degree in solved)
        touched = (*part.reads, *part.makes)
        local = [_local(body.tensors[v].shape, v, solved) for v in touched]
        marks = [v in flows and not flows.isdisjoint(part.makes) for v in part.reads]
        piece = single_piece(part.body, local, share, marks)
        there, back, _ = seconds(part.body, [body.tensors[v].shape for v in touched], piece, marks, machine)
        forward, backward = forward + float(there[0]), backward + float(back[0])
    return forward, backward


def _solution(body: Body, choice: Choice) -> Solution:
    solution = along_axis(body, choice.operands, choice.results)
    assert solution is not None, "a choice that splits something uses the axis"
    return solution


def _share(body: Body, part: LayerPart, solution: Solution, degree: int) -> float:
    """Return the fraction of a part's work that a piece does, where a layer is split along one of its dimensions."""
    own = {id(e) for e in part.body.equations}
    matched = zip(body.equations, solution.matches, strict=True)
    return part_of_work(divided_by(body, ((e, m) for e, m in matched if id(e) in own)), degree)


def _local(shape: tuple[int, ...], v: int, solved: Sequence[tuple[Solution, int]]) -> tuple[int, ...]:
    """Return a variable's shape in one piece."""
    local = list(shape)
    for solution, degree in solved:
        state = solution.states[v]
        if state.kind == "P":
            local[state.dim] //= degree
    return tuple(local)
