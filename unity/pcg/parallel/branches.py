"""Branches as one operator of a graph: programs that do not need each other, each on its own share of the devices.

Along the axes of such an operator device k is in *group* k, and runs the branches of this group only, one after the other:

    group 0    conv → relu → conv → relu
    group 1    conv → relu,  pool → conv

Outside, it is an operator like any other. What it reads is replicated for use along its axes, so gradients of that are summed up
there. What it makes is a partial sum along them: zeros everywhere but where the branch ran. So to join branches is to reduce, which
what follows may put off: a concatenation or a sum of branches is still a partial sum. Arrays that are *packed* have one slice for
each group, and are partitioned in these. Inside, everything is replicated along the axes: that devices of another group run
something else is nothing that an operator has to know. What runs is `unity.exec.branches`.

The *stages* of a pipeline may be such programs, too, where they are unlike (`unity.transforms.pipelining.apart`): a device runs the
one whose stage it is. All give the same results, of their own samples; so types are the same inside and outside of that operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from unity.base.errors import ParallelTypeError
from unity.pcg.ir.graph import PCG, STAGES, Node
from unity.pcg.propagation.choices import Choice, choices
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned, show


@dataclass(frozen=True, eq=False)
class Group:
    """What the devices of one group run: a graph of all operands, and which results of the operator its outputs are."""

    graph: PCG
    results: tuple[int, ...]


def names_of(node: Node) -> tuple[str, ...]:
    """The axes along which the groups lie, in the mesh's order."""
    return tuple(str(node.attributes["along"]).split())


def numbers_of(node: Node) -> tuple[int, ...]:
    """The group of every result."""
    return tuple(map(int, str(node.attributes["groups"]).split()))


def packed_of(node: Node) -> frozenset[int]:
    """The operands, by position, that have a slice for each group."""
    return frozenset(map(int, str(node.attributes["packed"]).split()))


def weight_of(node: Node) -> float:
    """What part of the time of all branches together the slowest group takes. Costs count this part of each."""
    return float(node.attributes["weight"])


def groups_of(node: Node) -> tuple[Group, ...]:
    """What each group runs; of stages each gives all results."""
    assert node.inside is not None
    if node.kind == STAGES:
        return _stages(node.inside)
    numbers, inside = numbers_of(node), node.inside
    found = [tuple(k for k, g in enumerate(numbers) if g == group) for group in range(max(numbers) + 1)]
    return tuple(Group(PCG(inside.inputs, tuple(inside.outputs[k] for k in part), inside.axes), part) for part in found)


def _stages(inside: PCG) -> tuple[Group, ...]:
    """Every output is one of what each of the stages gives."""
    ends = [v.node.operands for v in inside.outputs]
    every = tuple(range(len(ends)))
    return tuple(Group(PCG(inside.inputs, own, inside.axes), every) for own in zip(*ends, strict=True))


def outside_state(node: Node, position: int) -> State:
    """The state of an operand along the axes of the groups."""
    return partitioned(0) if position in packed_of(node) else REPLICATED


def everywhere(node: Node | None, operands: int, results: int) -> Choice:
    """What a place inside does along the axes of the groups: the same on every device, as far as it knows."""
    state = REPLICATED if operands or node is None else UNUSED  # a constant is the same anyway
    return Choice("replicated", (REPLICATED,) * operands, (state,) * results, 0, 0.0)


def confined(graph: PCG) -> Node | None:
    """The first operator of a graph that cannot run on some devices only; None if all can."""
    for node, _ in graph.walk():
        if node.body is None or not node.operands:
            continue
        wanted = everywhere(node, len(node.operands), len(node.tensors)).states
        if all(c.states != wanted for c in choices(node.body)):
            return node
    return None


def check_ends(node: Node, axes: tuple[Axis, ...]) -> None:
    """Raises ParallelTypeError unless operands and results are as groups need them along their axes, and as inside along others."""
    assert node.inside is not None
    names = names_of(node)
    over = [k for k, axis in enumerate(axes) if axis.name in names]
    count = max(numbers_of(node)) + 1
    if len(over) != len(names) or prod(axes[k].size for k in over) != count:
        mesh = " ".join(f"{axis.name}={axis.size}" for axis in axes)
        raise ParallelTypeError(f"{node.source}: {count} groups of branches along {' '.join(names)} cannot be on a mesh of {mesh}")
    for name, outside, inside, rank, wanted in _ends(node, over, len(axes)):
        if any(inside[k] != REPLICATED for k in over):
            raise ParallelTypeError(
                f"{node.source}: {name} of branches along {' '.join(names)} is {show(inside, axes, rank)} inside, but must be"
                f" replicated for use along {' '.join(names)}: devices of another group run something else. (docs: branches#types)"
            )
        if outside != wanted:
            raise ParallelTypeError(
                f"{node.source}: {name} of branches along {' '.join(names)} is {show(outside, axes, rank)}, but as it is"
                f" {show(inside, axes, rank)} inside it must be {show(wanted, axes, rank)}. (docs: branches#types)"
            )


Type = tuple[State, ...]


def _ends(node: Node, over: Sequence[int], axes: int) -> Iterator[tuple[str, Type, Type, int, Type]]:
    """Every operand and result: its name, type outside and inside, rank, and the type that it must have outside."""
    assert node.inside is not None

    def wanted(inside: Type, along: State, more: int) -> Type:
        moved = [State("P", s.dim + more, s.outer) if s.kind == "P" else s for s in inside]
        return tuple(along if k in over else moved[k] for k in range(axes))

    for p, (v, n) in enumerate(zip(node.operands, node.inside.inputs, strict=True)):
        inside = n.types[0]
        yield f"operand {p}", v.type, inside, v.tensor.ndim, wanted(inside, outside_state(node, p), int(p in packed_of(node)))
    for k, (v, w) in enumerate(zip(node.results, node.inside.outputs, strict=True)):
        yield f"result {k}", v.type, w.type, v.tensor.ndim, wanted(w.type, PARTIAL, 0)
