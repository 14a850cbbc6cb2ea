"""Packing of branches' weights, so that a device stores only its group's (`unity.pcg.capture.group_slots`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from unity.pcg.capture.group_slots import Leaf, Slots, part_of, slots_of
from unity.pcg.capture.packed_arguments import Packing
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.payloads import Branches, Input
from unity.pcg.ir.program import Tensor
from unity.pcg.parallel.branches import groups_of


def packed(graph: PCG, nodes: Sequence[Node], differentiated: Collection[int]) -> tuple[PCG, Packing]:
    """Pack the weights of a graph's branches where that reduces the bytes on a device."""
    slots: list[Slots] = []
    inputs: dict[int, Node] = {}  # by id of an argument: its new node
    replaced: dict[int, Node] = {}  # by id of a node of branches: its new node
    for node in nodes:
        own = list(slots_of(_own(graph, node, differentiated)))
        for s in own:
            old = graph.inputs[s.first]
            inputs[id(old)] = replace(old, tensors=(Tensor(s.stacked, old.tensors[0].dtype),))
            for k in s.others:
                inputs[id(graph.inputs[k])] = replace(graph.inputs[k], tensors=(Tensor((0,), old.tensors[0].dtype),))
        replaced[id(node)] = _with_slots(graph, node, own, inputs)
        slots += own
    new: dict[int, Node] = {}
    for node in graph.nodes:
        after = inputs.get(id(node), replaced.get(id(node), node))
        operands = tuple(Value(new.get(id(v.node), v.node), v.index) for v in after.operands)
        same = all(v.node is w.node for v, w in zip(operands, after.operands, strict=True))
        new[id(node)] = after if same else replace(after, operands=operands)
    outputs = tuple(Value(new[id(v.node)], v.index) for v in graph.outputs)
    return PCG(tuple(new[id(n)] for n in graph.inputs), outputs, graph.axes), Packing(tuple(slots))


def _own(graph: PCG, node: Node, differentiated: Collection[int]) -> list[list[Leaf]]:
    """Return, for every group, the weights that no other operator reads."""
    assert node.inside is not None
    by_group = []
    position = {id(n): k for k, n in enumerate(graph.inputs)}
    read = [{id(v.node) for n in group.graph.nodes for v in n.operands} for group in groups_of(node)]
    ends = {id(v.node) for v in graph.outputs}
    for group, here in enumerate(read):
        leaves = []
        for v, start in zip(node.operands, node.inside.inputs, strict=True):
            k = position.get(id(v.node), -1)
            alone = len(graph.users[id(v.node)]) == 1 and id(v.node) not in ends
            elsewhere = any(id(start) in other for g, other in enumerate(read) if g != group)
            if k in differentiated and v.tensor.floating and alone and id(start) in here and not elsewhere:
                leaves.append(Leaf(k, v.tensor))
        by_group.append(leaves)
    return by_group


def _with_slots(graph: PCG, node: Node, slots: Sequence[Slots], inputs: Mapping[int, Node]) -> Node:
    """Return branches that read packed arrays instead of weights."""
    assert node.inside is not None
    packed_leaves = {leaf for s in slots for leaf in s.leaves if leaf is not None}
    position = {id(n): k for k, n in enumerate(graph.inputs)}
    leaf_of = [position.get(id(v.node), -1) for v in node.operands]
    unpacked = [p for p, leaf in enumerate(leaf_of) if leaf not in packed_leaves]
    starts = {leaf_of[p]: node.inside.inputs[p] for p in range(len(leaf_of)) if leaf_of[p] in packed_leaves}
    operands = [node.operands[p] for p in unpacked]
    inner: dict[int, Node] = {id(node.inside.inputs[p]): node.inside.inputs[p] for p in unpacked}
    ends = [node.inside.inputs[p] for p in unpacked]
    for s in slots:
        array = inputs[id(graph.inputs[s.first])]
        tensor, number = Tensor(s.shape, array.tensors[0].dtype), len(operands)
        start = Node("input", (), (tensor,), payload=Input(number, f"slot {number}"))
        operands.append(Value(graph.inputs[s.first]))
        ends.append(start)
        for leaf, shape in zip(s.leaves, s.shapes, strict=True):
            if leaf is not None:
                inner[id(starts[leaf])] = part_of(start, shape, node.source).node
    for n in node.inside.nodes:
        if n.kind != "input":
            inner[id(n)] = replace(n, operands=tuple(Value(inner[id(v.node)], v.index) for v in n.operands))
    inside = PCG(tuple(ends), tuple(Value(inner[id(v.node)], v.index) for v in node.inside.outputs))
    payload = structs.replace(node.of(Branches), packed=tuple(range(len(unpacked), len(operands))))
    return replace(node, operands=tuple(operands), inside=inside, payload=payload)
