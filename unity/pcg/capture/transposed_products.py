"""Transposes that matrix products read: a product says itself in which order it takes the dimensions of its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.extend import core

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.types.accumulation import narrow


def absorbed(body: Body) -> Body:
    """The body with transposes of products' operands in the products' dimension numbers, as XLA has them: no kernel runs for them.

    A transpose stays where a product's result would have another order of dimensions.
    """
    transposes = {e.results[0]: e for e in body.equations if e.name == "transpose" and isinstance(e.operands[0], int)}
    if not any(e.name == "dot_general" and not transposes.keys().isdisjoint(_variables(e)) for e in body.equations):
        return body
    equations = tuple(_reading(body, e, transposes) if e.name == "dot_general" else e for e in body.equations)
    return used(Body(body.inputs, body.outputs, equations, body.tensors))


def _variables(equation: Equation) -> list[int]:
    return [a for a in equation.operands if isinstance(a, int)]


def _reading(body: Body, product: Equation, transposes: Mapping[int, Equation]) -> Equation:
    """The product of what its operands are transposes of."""
    eqn, tensors = product.origin, [body.tensor(a) for a in product.operands]
    assert eqn is not None
    contracted, batched = map(list, product.params["dimension_numbers"])
    operands: list[Atom] = list(product.operands)
    variables: list[core.Var | core.Literal] = list(eqn.invars)
    for k, atom in enumerate(product.operands):
        while isinstance(atom, int) and (transpose := transposes.get(atom)) is not None:
            order = transpose.params["permutation"]
            free = [order[d] for d in range(len(order)) if d not in (*contracted[k], *batched[k])]
            if free != sorted(free):
                break
            contracted[k], batched[k] = _permuted(order, contracted[k]), _permuted(order, batched[k])
            assert transpose.origin is not None
            atom, variables[k] = transpose.operands[0], transpose.origin.invars[0]
            operands[k] = atom
    if tuple(operands) == product.operands or (
        tensors[0].floating and narrow(tensors[0].dtype) and _turned([t.ndim for t in tensors], contracted, batched)
    ):
        return product
    params = {**product.params, "dimension_numbers": (tuple(contracted), tuple(batched))}
    return replace(product, params=params, operands=tuple(operands), origin=eqn.replace(invars=variables, params=params))


def _turned(ranks: Sequence[int], contracted: Sequence[tuple[int, ...]], batched: Sequence[tuple[int, ...]]) -> bool:
    """Whether both operands have what is summed in the wrong place: XLA's CPU backend has no such products of narrow numbers with
    wide results, as partial sums are.
    """
    free = [[d for d in range(n) if d not in (*contracted[k], *batched[k])] for k, n in enumerate(ranks)]
    return min(contracted[0], default=0) < max(free[0], default=0) and max(contracted[1], default=0) > min(free[1], default=0)


def _permuted(order: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(order[d]) for d in dims)
