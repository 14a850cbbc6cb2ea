"""What a piece of an operator computes, where the operator is a layer: one after the other what capture has as operators.

A layer's program has a product or a convolution among other equations. Nothing is known of such programs as a whole, neither a
measured time nor one of a roofline's, which would let the product hide the traffic of what follows. So a layer takes as long as its
parts do, each on its own, and a strategy of layers as long as that of their parts on the same devices (but for gradients of biases:
they are summed when the whole layer has computed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from unity.machine.machine import Machine
from unity.pcg.capture.clustering import clusters
from unity.pcg.capture.heavy_operators import constants, light
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.gradient_flow import carrying
from unity.pcg.ir.program import Body
from unity.pcg.propagation.choices import Choice, divided_by, part_of_work
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.solver import Solution
from unity.search.cost.cost import Pieces, seconds
from unity.search.cost.roofline import touches

Cut = tuple[Choice, int]  # a way to split an operator, and in how many parts


@dataclass(frozen=True, eq=False)
class Part:
    """One of a layer's operators: its program, and what variables of the layer's it reads and makes."""

    body: Body
    reads: tuple[int, ...]
    makes: tuple[int, ...]


def is_layer(body: Body) -> bool:
    """Whether an operator is one of several."""
    return len(parts(body)) > 1


@lru_cache(maxsize=4096)
def parts(body: Body) -> tuple[Part, ...]:
    """The operators that a layer consists of; of one that has none but light work, none."""
    if all(map(light, body.equations)):
        return ()
    constant, found = constants(body), list[Part]()
    for cluster in clusters(body, constant):
        part, reads = extract(body, cluster.members, cluster.outputs, constant)
        found.append(Part(part, reads, cluster.outputs))
    return tuple(found)


def seconds_of(
    body: Body, cuts: Sequence[Cut], operands: Sequence[bool], results: Sequence[bool], machine: Machine
) -> tuple[float, float]:
    """Seconds forward and backward of one piece of a layer. `operands`, `results`: of which a gradient is computed."""
    flows = carrying(body, tuple(operands), tuple(results))
    solved = [(_solution(body, choice), degree) for choice, degree in cuts]
    forward, backward = 0.0, 0.0
    for part in parts(body):
        share = prod(_share(body, part, solution, degree) for solution, degree in solved)
        touched = (*part.reads, *part.makes)
        local = [_local(body.tensors[v].shape, v, solved) for v in touched]
        portions = zip(touched, local, touches(part.body), strict=True)
        nbytes = sum(prod(shape) * body.tensors[v].itemsize * portion for v, shape, portion in portions)
        piece = Pieces(np.array([float(share)]), np.array([float(nbytes)]), np.array([[n for shape in local for n in shape]], int))
        marks = [v in flows and not flows.isdisjoint(part.makes) for v in part.reads]
        there, back, _ = seconds(part.body, [body.tensors[v].shape for v in touched], piece, marks, machine)
        forward, backward = forward + float(there[0]), backward + float(back[0])
    return forward, backward


def _solution(body: Body, choice: Choice) -> Solution:
    found = along_axis(body, choice.operands, choice.results)
    assert found is not None, "a choice that splits something uses the axis"
    return found


def _share(body: Body, part: Part, solution: Solution, degree: int) -> float:
    """What of a part's work is a piece's, where a layer is split along one of its dimensions."""
    own = {id(e) for e in part.body.equations}
    matched = zip(body.equations, solution.matches, strict=True)
    return part_of_work(divided_by(body, ((e, m) for e, m in matched if id(e) in own)), degree)


def _local(shape: tuple[int, ...], v: int, solved: Sequence[tuple[Solution, int]]) -> tuple[int, ...]:
    """A variable's shape in one piece."""
    found = list(shape)
    for solution, degree in solved:
        state = solution.states[v]
        if state.kind == "P":
            found[state.dim] //= degree
    return tuple(found)
