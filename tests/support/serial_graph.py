"""Runs a serial graph by JAX's own primitives: what a captured graph means, without anything parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.payloads import Scan
from unity.pcg.ir.program import Body, Literal
from unity.pcg.propagation.nested.derivative_rules import as_function


def evaluate(graph: PCG, leaves: Sequence[Any]) -> list:
    """The outputs of a graph for its inputs."""
    env: dict[Value, Any] = {Value(n): x for n, x in zip(graph.inputs, leaves, strict=True)}
    for node in graph.nodes:
        if node.kind != "input":
            env.update(zip(node.results, _run(node, [env[v] for v in node.operands]), strict=True))
    return [env[v] for v in graph.outputs]


def _run(node: Node, operands: list) -> list:
    inside = node.inside
    if inside is None:
        assert node.body is not None
        return _body(node.body, operands)
    if node.kind != "scan":
        return evaluate(inside, operands)
    loop = node.of(Scan)
    consts, carry = loop.consts, loop.carry

    def step(c: Any, x: Any) -> Any:
        out = evaluate(inside, [*operands[:consts], *c, *x])
        return out[:carry], out[carry:]

    start, xs = operands[consts : consts + carry], operands[consts + carry :]
    last, ys = lax.scan(step, start, xs, length=loop.length, reverse=loop.reverse)
    return [*last, *ys]


def _body(body: Body, operands: list) -> list:
    env = dict(zip(body.inputs, operands, strict=True))

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return env[atom]
        extended = jnp.issubdtype(atom.tensor.dtype, jax.dtypes.extended)
        return atom.value if extended else jnp.asarray(atom.value, atom.tensor.dtype)

    for e in body.equations:
        operands = [read(a) for a in e.operands]
        if e.origin is None:  # made by the capture
            bound = e.primitive.bind(*operands, **e.params)
            results = bound if e.primitive.multiple_results else [bound]
        else:
            results = as_function(e)(*operands)
        env.update(zip(e.results, results, strict=True))
    return [read(a) for a in body.outputs]
