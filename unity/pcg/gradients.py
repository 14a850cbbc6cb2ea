"""Which values a gradient flows through, and what the backward pass needs to have been kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from unity.pcg.body import Body
from unity.pcg.choices import choices
from unity.pcg.graph import PCG, Node, Value
from unity.pcg.state import PARTIAL, REPLICATED


@dataclass(frozen=True)
class Gradients:
    """For every value of a graph and of the graphs inside it: whether a cotangent is computed for it."""

    flows: Mapping[tuple[int, int], bool]  # (id(node), result index)

    def __call__(self, v: Value) -> bool:
        return self.flows.get((id(v.node), v.index), False)


def gradients(graph: PCG, inputs: Collection[int]) -> Gradients:
    """Gradient flow when the inputs with these numbers are differentiated. Integers and stopped gradients carry none."""
    flows: dict[tuple[int, int], bool] = {}
    _forward(graph, {k: k in inputs for k in range(len(graph.inputs))}, flows)
    return Gradients(flows)


def _forward(graph: PCG, inputs: Mapping[int, bool], flows: dict[tuple[int, int], bool]) -> list[bool]:
    for k, node in enumerate(graph.inputs):
        flows[id(node), 0] = inputs[k] and node.tensors[0].floating
    for node in graph.nodes:
        if node.kind == "input":
            continue
        operands = [flows[id(v.node), v.index] for v in node.operands]
        if node.inside is not None:
            results = _nested(node, operands, flows)
        elif node.body is not None:
            reach = reached(node.body, tuple(operands))
            results = [r and t.floating for r, t in zip(reach, node.tensors, strict=True)]
        else:
            results = [any(operands) and t.floating for t in node.tensors]
        flows.update({(id(node), k): r for k, r in enumerate(results)})
    return [flows[id(v.node), v.index] for v in graph.outputs]


def _nested(node: Node, operands: list[bool], flows: dict[tuple[int, int], bool]) -> list[bool]:
    assert node.inside is not None
    inside = dict(enumerate(operands))
    if node.kind != "scan":
        return _forward(node.inside, inside, flows)
    consts, carry = int(node.attributes["consts"]), int(node.attributes["carry"])
    while True:  # what the carry gains on one step is there on the next
        results = _forward(node.inside, inside, flows)
        grown = {consts + k: inside[consts + k] or results[k] for k in range(carry)}
        if all(inside[k] == v for k, v in grown.items()):
            return results
        inside |= grown


@lru_cache(maxsize=65536)
def reached(body: Body, operands: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which outputs depend differentiably on the operands that are marked."""
    live = {v for v, flag in zip(body.inputs, operands, strict=True) if flag}
    for e in body.equations:
        if e.name != "stop_gradient" and any(isinstance(a, int) and a in live for a in e.operands):
            live.update(v for v in e.results if body.tensors[v].floating)
    return tuple(isinstance(a, int) and a in live for a in body.outputs)


@lru_cache(maxsize=65536)
def kept(body: Body, differentiated: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which operands the backward pass needs: none of a linear operator's, the other factor of a product, else all."""
    wanted = [p for p, flag in enumerate(differentiated) if flag]
    if not wanted:
        return (False,) * len(differentiated)
    floating = [body.tensors[v].floating for v in body.inputs]
    linear = [{p for p, s in enumerate(c.operands) if s == PARTIAL} for c in choices(body) if _linear(c.operands)]
    if any(set(wanted) <= group for group in linear):
        return (False,) * len(differentiated)
    if all(any(p in group for group in linear) for p in wanted):
        groups = {p: next(g for g in linear if p in g) for p in wanted}
        return tuple(f and any(p not in groups[q] for q in wanted) for p, f in enumerate(floating))
    return tuple(floating)


def _linear(operands: tuple) -> bool:
    return PARTIAL in operands and all(s in (PARTIAL, REPLICATED) for s in operands)
