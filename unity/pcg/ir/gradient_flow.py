"""Gradient flow: the values of a graph or a body that have a cotangent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from unity.pcg.ir.differentiable_dependence import differentiated_by_result
from unity.pcg.ir.graph import LOOPS, PCG, Node, Value, recurrent
from unity.pcg.ir.program import Body


@dataclass(frozen=True)
class Gradients:
    """The values of a graph, and of the graphs inside it, for which a cotangent is computed. They are called with a value.

    Attributes:
        flows: whether a value has a cotangent, by (id(node), result index).
        tangents: whether a value depends differentiably on the inputs, though the outputs may not depend on it.
    """

    flows: Mapping[tuple[int, int], bool]
    tangents: Mapping[tuple[int, int], bool]

    def __call__(self, v: Value) -> bool:
        return self.flows.get((id(v.node), v.index), False)

    def has_tangent(self, v: Value) -> bool:
        """Return whether a value depends differentiably on the inputs."""
        return self.tangents.get((id(v.node), v.index), False)


def gradients(graph: PCG, inputs: Collection[int], outputs: Collection[int] | None = None) -> Gradients:
    """Follow gradients from the outputs with these numbers (None: `losses`) to the inputs with these numbers.

    Integers and stopped gradients carry none; nor does what reaches no such output.
    """
    flows: dict[tuple[int, int], bool] = {}
    _forward(graph, {k: k in inputs for k in range(len(graph.inputs))}, flows)
    wanted: set[tuple[int, int]] = set()
    ends = losses(graph) if outputs is None else outputs
    _backward(graph, [k in ends for k in range(len(graph.outputs))], wanted)
    return Gradients({k: flag and k in wanted for k, flag in flows.items()}, flows)


def with_gradient(node: Node, flow: Gradients) -> tuple[bool, ...]:
    """Return for each operand whether a gradient flows back to it."""
    flows = any(map(flow, node.results))
    return tuple(flows and flow(v) for v in node.operands)


def losses(graph: PCG) -> tuple[int, ...]:
    """Return the differentiated outputs: the first one if it is a scalar (the rest is auxiliary, as in `jax.grad`), else all."""
    floating = tuple(k for k, v in enumerate(graph.outputs) if v.tensor.floating)
    scalar = floating[:1] == (0,) and graph.outputs[0].tensor.shape == ()
    return (0,) if scalar else floating


def _backward(graph: PCG, outputs: list[bool], wanted: set[tuple[int, int]]) -> list[bool]:
    """Add every value that a marked output depends on differentiably to `wanted`. Returns whether each input is among them."""
    wanted.update((id(v.node), v.index) for v, flag in zip(graph.outputs, outputs, strict=True) if flag)
    for node in reversed(graph.nodes):
        marks = tuple((id(node), k) in wanted for k in range(len(node.tensors)))
        if node.kind != "input" and any(marks):
            operands = _needed(node, marks, wanted)
            wanted.update((id(v.node), v.index) for v, flag in zip(node.operands, operands, strict=True) if flag)
    return [(id(n), 0) in wanted for n in graph.inputs]


def _needed(node: Node, marks: tuple[bool, ...], wanted: set[tuple[int, int]]) -> list[bool]:
    """Return whether the marked results depend on each operand."""
    if node.body is not None:
        return list(leading_to(node.body, marks))
    if node.inside is None:
        return [True] * len(node.operands)
    if node.kind not in LOOPS:
        return _backward(node.inside, list(marks), wanted)
    carried = recurrent(node)
    ends = list(marks)
    while True:
        operands = _backward(node.inside, ends, wanted)
        grown = [e or operands[carried[k]] if k < len(carried) else e for k, e in enumerate(ends)]
        if grown == ends:
            return operands
        ends = grown


@lru_cache(maxsize=65536)
def leading_to(body: Body, outputs: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return whether the marked outputs depend differentiably on each input."""
    variables = wanted_by(body, outputs)
    return tuple(v in variables for v in body.inputs)


@lru_cache(maxsize=65536)
def wanted_by(body: Body, outputs: tuple[bool, ...]) -> frozenset[int]:
    """Return the variables that the marked outputs depend on differentiably."""
    variables = {
        a for a, flag in zip(body.outputs, outputs, strict=True) if flag and isinstance(a, int) and body.tensors[a].floating
    }
    for e in reversed(body.equations):
        if variables.intersection(e.results):
            read = (a for v, of in zip(e.results, differentiated_by_result(e), strict=True) if v in variables for a in of)
            variables.update(a for a in set(read) if body.tensors[a].floating)
    return frozenset(variables)


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
    if node.kind not in LOOPS:
        return _forward(node.inside, inside, flows)
    carried = recurrent(node)
    while True:  # what the carry gains on one step is there on the next
        results = _forward(node.inside, inside, flows)
        grown = {p: inside[p] or results[k] for k, p in enumerate(carried)}
        if all(inside[k] == v for k, v in grown.items()):
            return results
        inside |= grown


@lru_cache(maxsize=65536)
def carrying(body: Body, operands: tuple[bool, ...], outputs: tuple[bool, ...]) -> frozenset[int]:
    """Return the variables through which a gradient flows from the marked outputs to the marked operands."""
    return frozenset(dependent(body, operands) & wanted_by(body, outputs))


def carrying_in(node: Node, flow: Gradients) -> frozenset[int]:
    """Return the variables of an operator's program through which a gradient flows."""
    assert node.body is not None
    return carrying(node.body, tuple(map(flow, node.operands)), tuple(map(flow, node.results)))


@lru_cache(maxsize=65536)
def reached(body: Body, operands: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return whether each output depends differentiably on the marked operands."""
    variables = dependent(body, operands)
    return tuple(isinstance(a, int) and a in variables for a in body.outputs)


def dependent(body: Body, operands: tuple[bool, ...], inactive: Collection[int] = ()) -> set[int]:
    """Return the variables that depend differentiably on the marked operands, other than through variables known to be inactive."""
    variables = {v for v, flag in zip(body.inputs, operands, strict=True) if flag}
    for e in body.equations:
        for v, read in zip(e.results, differentiated_by_result(e), strict=True):
            if body.tensors[v].floating and v not in inactive and not variables.isdisjoint(read):
                variables.add(v)
    return variables
