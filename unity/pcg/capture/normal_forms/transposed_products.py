"""Absorption of transposes into the matrix products that read them, through the products' dimension numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.product_precision import of_swapped_operands
from unity.pcg.types.accumulation import narrow


def absorbed(body: Body) -> Body:
    """Return a body whose products read the operands of transposes, as in XLA, which runs no kernel for these transposes.

    A transpose stays if the dimensions of the product's result would have another order without it. Such a result that is itself
    only transposed, as `vmap` does with `weight @ x`, is a product of the operands in the other order.
    """
    body = _with_swapped_operands(body)
    transposes = {e.results[0]: e for e in body.equations if e.name == "transpose" and isinstance(e.operands[0], int)}
    if not any(e.name == "dot_general" and not transposes.keys().isdisjoint(_variables(e)) for e in body.equations):
        return body
    equations = tuple(_absorb(body, e, transposes) if e.name == "dot_general" else e for e in body.equations)
    return used(Body(body.inputs, body.outputs, equations, body.tensors))


def _with_swapped_operands(body: Body) -> Body:
    """Return a body with swapped operands of the products whose results only a transpose reads that exchanges their dimensions."""
    products = {e.results[0]: e for e in body.equations if e.name == "dot_general"}
    ends = set(body.outputs)
    swapped: dict[int, Equation] = {}  # products in their new order, by the results that they had
    for e in body.equations if products else ():
        if e.name != "transpose" or not isinstance(v := e.operands[0], int) or v not in products or v in ends:
            continue
        if sum(v in body.equations[i].operands for i in body.touching[v]) == 1:
            product = _swapped(body, products[v], e)
            swapped |= {v: product} if product is not None else {}
    if not swapped:
        return body
    turned = {e.results[0] for e in swapped.values()}
    others = (e for e in body.equations if e.name != "transpose" or e.results[0] not in turned)
    equations = tuple(swapped.get(e.results[0], e) if e.name == "dot_general" else e for e in others)
    return used(Body(body.inputs, body.outputs, equations, body.tensors))


def _swapped(body: Body, product: Equation, transpose: Equation) -> Equation | None:
    """Return the product with its operands in the other order if that is what the transpose makes of it."""
    (contracted, batched), (one, other) = product.params["dimension_numbers"], map(body.tensor, product.operands)
    n = len(batched[0])
    first, second = (tensor.ndim - n - len(contracted[0]) for tensor in (one, other))
    if product.params.get("out_sharding") is not None:  # of the order that it had
        return None
    if tuple(transpose.params["permutation"]) != (*range(n), *range(n + first, n + first + second), *range(n, n + first)):
        return None
    dimension_numbers = tuple(contracted[::-1]), tuple(batched[::-1])
    if one.floating and narrow(one.dtype) and _is_unsupported([other.ndim, one.ndim], *dimension_numbers):
        return None
    precision = of_swapped_operands(product.params["precision"])
    params = {**product.params, "dimension_numbers": dimension_numbers, "precision": precision}
    return replace(product, params=params, operands=product.operands[::-1], results=transpose.results, origin=None)


def _variables(equation: Equation) -> list[int]:
    return [a for a in equation.operands if isinstance(a, int)]


def _absorb(body: Body, product: Equation, transposes: Mapping[int, Equation]) -> Equation:
    """Return a product that reads the operands of the transposes that it read, or the product itself if it cannot."""
    tensors = [body.tensor(a) for a in product.operands]
    contracted, batched = map(list, product.params["dimension_numbers"])
    operands: list[Atom] = list(product.operands)
    for k, atom in enumerate(product.operands):
        while isinstance(atom, int) and (transpose := transposes.get(atom)) is not None:
            order = transpose.params["permutation"]
            free = [order[d] for d in range(len(order)) if d not in (*contracted[k], *batched[k])]
            if free != sorted(free):
                break
            contracted[k], batched[k] = _permuted(order, contracted[k]), _permuted(order, batched[k])
            atom = operands[k] = transpose.operands[0]
    if tuple(operands) == product.operands or (
        tensors[0].floating and narrow(tensors[0].dtype) and _is_unsupported([t.ndim for t in tensors], contracted, batched)
    ):
        return product
    params = {**product.params, "dimension_numbers": (tuple(contracted), tuple(batched))}
    return replace(product, params=params, operands=tuple(operands), origin=None)


def _is_unsupported(ranks: Sequence[int], contracted: Sequence[tuple[int, ...]], batched: Sequence[tuple[int, ...]]) -> bool:
    """Return whether XLA's CPU backend lacks a product in this layout with a wider result than its operands, as for partial sums.

    It lacks products that contract a leading dimension of the first operand and a trailing one of the second.
    """
    free = [[d for d in range(n) if d not in (*contracted[k], *batched[k])] for k, n in enumerate(ranks)]
    return min(contracted[0], default=0) < max(free[0], default=0) and max(contracted[1], default=0) > min(free[1], default=0)


def _permuted(order: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(order[d]) for d in dims)
