"""Loop-invariant code motion: values that depend on a scan's constants alone, or on nothing, are computed once, before its steps.

When JAX differentiates a scan, it hoists everything that depends neither on the carry nor on stacked operands out of the loop; XLA
does the same to a loop that is not differentiated. So in the forward pass such an operator runs less often than its graph. In the
backward pass every step computes a gradient of the constants, and recomputes its own values.

Of a remat in a remat, JAX hoists only what the inner one's policy saves, also of remats in this one: every step computes the rest
for itself. The backward pass of a remat runs its program as if it were in none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unity.pcg.analysis.policies import policies_of, saves_collectives
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.payloads import Scan


def hoisted(graph: PCG, flow: Callable[[Value], bool]) -> Mapping[int, int]:
    """Return, by id(node), the factors greater than 1 by which nodes run less often than their graph in the forward pass.

    The nodes include the inputs of nested graphs.

    Args:
        graph: the graph.
        flow: where gradients flow.
    """
    factors: dict[int, int] = {}
    _hoist(graph, [1] * len(graph.inputs), 1, 0, flow, factors)
    return factors


def hoisted_again(remat: Node, flow: Callable[[Value], bool]) -> Mapping[int, int]:
    """Return the factors of `hoisted` with which nodes in a remat run when the backward pass recomputes it."""
    factors: dict[int, int] = {}
    if remat.inside is not None:
        _hoist(remat.inside, [1] * len(remat.inside.inputs), 1, 0, flow, factors)
    return factors


def residual_factors(graph: PCG) -> Mapping[int, int]:
    """Return the factors of `hoisted` by which nodes have fewer residuals, too. Nodes in remats have none of these."""
    in_remat = {
        id(n) for node, _ in graph.walk() if node.kind == "remat" and node.inside is not None for n, _ in node.inside.walk()
    }
    return {key: k for key, k in hoisted(graph, lambda _: False).items() if key not in in_remat}


def _hoist(
    graph: PCG, inputs: Sequence[int], invariant: int, remats: int, flow: Callable[[Value], bool], factors: dict[int, int]
) -> list[int]:
    """Collect the factors of a graph's nodes and return those of its outputs.

    Args:
        graph: the graph.
        inputs: the factors of its inputs.
        invariant: the factor of its operators without operands.
        remats: 0 outside of remats, 1 in a remat, 2 in a remat in a remat without a loop between these.
        flow: where gradients flow.
        factors: receives all factors greater than 1, by id.
    """
    less = {id(node): k for node, k in zip(graph.inputs, inputs, strict=True)}
    for node in graph.nodes:
        if node.kind == "input":
            continue
        operands, own = [less[id(v.node)] for v in node.operands], invariant
        if node.inside is not None:
            if node.kind == "remat" and remats == 1 and any(map(flow, node.results)) and not saves_collectives(policies_of(node)):
                operands, own = [1] * len(operands), 1
            inner = min(remats + 1, 2) if node.kind == "remat" else min(remats, 1)
            results = _hoist(node.inside, *_inside_factors(node, operands, own), inner, flow, factors)
            operands = results if node.kind == "remat" else [1]
        if remats and node.again:  # JAX does not hoist a checkpoint in a checkpoint
            operands = [1]
        less[id(node)] = min(operands, default=own)
    factors.update((key, k) for key, k in less.items() if k > 1)
    return [less[id(v.node)] for v in graph.outputs]


def _inside_factors(node: Node, operands: Sequence[int], invariant: int) -> tuple[list[int], int]:
    """Return the factors of the inputs of a nested graph, and of its operators without operands.

    A scan's constants are computed once for all its steps.
    """
    assert node.inside is not None
    if node.kind == "remat":
        return list(operands), invariant
    if not isinstance(node.payload, Scan):
        return [1] * len(node.inside.inputs), 1
    constants, length = node.payload.consts, node.payload.length
    return [length * operands[p] if p < constants else 1 for p in range(len(node.inside.inputs))], length * invariant
