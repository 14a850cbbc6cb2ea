"""Branches as one operator of a graph: independent programs, each on a share of the devices.

Along the axes of such an operator, device k belongs to *group* k and runs only that group's branches, one after the other:

    group 0    conv → relu → conv → relu
    group 1    conv → relu,  pool → conv

From outside it is an operator like any other. Its operands are replicated for use along its axes, so their gradients are summed
there. Its results are partial sums along them: zeros on every device but those that ran the branch. Joining branches is therefore a
reduce, which later operators may postpone: a concatenation or a sum of branches is still a partial sum. A *packed* operand has one
slice for each group, and is partitioned in these. Inside, everything is replicated along the axes: no operator needs to know that
the devices of another group run something else. `unity.exec.branches` runs it.

The stages of a pipeline may be such programs, too, if they differ (`unity.transforms.pipelining.unlike`): a device runs its stage's
program (`STAGES`). All of them compute the same results for different samples, so types are the same inside and outside of that
operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity.base.errors import ParallelTypeError
from unity.pcg.ir.graph import PCG, STAGES, Node, reserved_axes
from unity.pcg.ir.payloads import Branches, Stages
from unity.pcg.parallel.stages import positions_along
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.solver import replicable
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, Type, partitioned, show


@dataclass(frozen=True, eq=False)
class Group:
    """The program of one group's devices.

    Attributes:
        graph: the program, a function of all operands of the branches operator.
        results: the positions, among the operator's results, of the graph's outputs.
    """

    graph: PCG
    results: tuple[int, ...]


def _payload(node: Node) -> Branches | Stages:
    assert isinstance(node.payload, (Branches, Stages)), node
    return node.payload


def packed_of(node: Node) -> frozenset[int]:
    """Return the positions of the operands that have a slice for each group."""
    return frozenset(_payload(node).packed)


def weight_of(node: Node) -> float:
    """Return the slowest group's share of the time of all branches together. Costs count this share of every branch."""
    return _payload(node).weight


def groups_of(node: Node) -> tuple[Group, ...]:
    """Return the program of each group. Every stage computes all results."""
    assert node.inside is not None
    if node.kind == STAGES:
        return _stages(node.inside)
    numbers, inside = node.of(Branches).groups, node.inside
    results = [tuple(k for k, g in enumerate(numbers) if g == group) for group in range(max(numbers) + 1)]
    return tuple(Group(PCG(inside.inputs, tuple(inside.outputs[k] for k in own), inside.axes), own) for own in results)


def _stages(inside: PCG) -> tuple[Group, ...]:
    """Return the program of each stage: operand k of an output's placeholder node is the result of stage k."""
    alternatives = [v.node.operands for v in inside.outputs]
    every = tuple(range(len(alternatives)))
    return tuple(Group(PCG(inside.inputs, own, inside.axes), every) for own in zip(*alternatives, strict=True))


def outside_state(node: Node, position: int) -> State:
    """Return the state of an operand along the axes of the groups."""
    return partitioned(0) if position in packed_of(node) else REPLICATED


def replicated_choice(node: Node | None, operands: int, results: int) -> Choice:
    """Return the choice of an operator inside of branches, along the axes of the groups: it is replicated.

    Args:
        node: the operator, or None for a free site: a boundary of the graph, or a copy.
        operands: the number of its operands.
        results: the number of its results.
    """
    state = REPLICATED if operands or node is None else UNUSED  # a constant is the same on every device
    return Choice("replicated", (REPLICATED,) * operands, (state,) * results, 0, 0.0)


def first_unreplicable(graph: PCG) -> Node | None:
    """Return the first operator of a graph that cannot be replicated, and so cannot be inside of branches; or None."""
    for node, _ in graph.walk():
        if node.body is None or not node.operands:
            continue
        if not replicable(node.body):
            return node
    return None


def check_boundary_types(node: Node, axes: tuple[Axis, ...]) -> None:
    """Raise ParallelTypeError unless the operator's boundary types fit its groups.

    Along the axes of the groups, operands and results have the states that the module describes; along all other axes a type is the
    same inside and outside.
    """
    assert node.inside is not None
    count = max(node.of(Branches).groups) + 1
    names, over = reserved_axes(node), positions_along(node, axes, count, f"{count} groups of branches")
    for name, outside, inside, rank, expected in _boundary_types(node, over, len(axes)):
        if any(inside[k] != REPLICATED for k in over):
            raise ParallelTypeError(
                f"{node.source}: {name} of branches along {' '.join(names)} is {show(inside, axes, rank)} inside, but must be"
                f" replicated for use along {' '.join(names)}: devices of another group run something else. (docs: branches#types)"
            )
        if outside != expected:
            raise ParallelTypeError(
                f"{node.source}: {name} of branches along {' '.join(names)} is {show(outside, axes, rank)}, but as it is"
                f" {show(inside, axes, rank)} inside it must be {show(expected, axes, rank)}. (docs: branches#types)"
            )


def _boundary_types(node: Node, over: Sequence[int], axes: int) -> Iterator[tuple[str, Type, Type, int, Type]]:
    """Yield for every operand and result its name, type outside, type inside, rank, and the type required outside."""
    assert node.inside is not None

    def expected(inside: Type, along: State, leading: int) -> Type:
        shifted = [State("P", s.dim + leading, s.outer) if s.kind == "P" else s for s in inside]
        return tuple(along if k in over else shifted[k] for k in range(axes))

    for p, (v, n) in enumerate(zip(node.operands, node.inside.inputs, strict=True)):
        inside = n.types[0]
        yield f"operand {p}", v.type, inside, v.tensor.ndim, expected(inside, outside_state(node, p), int(p in packed_of(node)))
    for k, (v, w) in enumerate(zip(node.results, node.inside.outputs, strict=True)):
        yield f"result {k}", v.type, w.type, v.tensor.ndim, expected(w.type, PARTIAL, 0)
