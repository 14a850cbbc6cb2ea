"""Constructors of canonical values, one for each kind of node.

Rearrangements are pushed outwards: an operator works in the layout of its operands' nodes where the result is the same, and the
remaining rearrangement becomes the view of the result. Nothing else is simplified: every operator of a program is one node.
"""

from __future__ import annotations

from math import prod
from typing import Any

from unity.pcg.ir.program import tensor_type
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rearrangement import Rearrangement, after, reshaped, unchanged
from unity.verify.derivations.layouts import beside, boxed, lifted, ordering, unmoved
from unity.verify.derivations.nodes import CanonicalValue, NodeStore, Params, canonically_viewed, constructs, text_of

COMMUTATIVE = frozenset({"add", "mul"})


@constructs("laid")
def _laid(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Return the operand of an explicit rearrangement: with another operand, the two may be composable."""
    return operands[0]


@constructs("function")
def _function(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Apply a function to every element of one tensor. Params: its name."""
    (x,) = operands
    node = store.node("function", params, (CanonicalValue(x.node, unchanged(x.node.shape)),), tensor_type(x.node.shape, dtype))
    return CanonicalValue(node, x.view)


@constructs("broadcast")
def _broadcast(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Repeat a tensor along a new leading dimension. Params: how often."""
    (n,), (x,) = params, operands
    view: Rearrangement | None = lifted(n, x.view)
    if x.node.kind == "broadcast":  # merge the two leading dimensions
        m, *inner = x.node.shape
        view = after(view, reshaped((n * m, *inner), (n, m, *inner)))
        n, x = n * m, x.node.operands[0]
    assert view is not None
    own = CanonicalValue(x.node, unchanged(x.node.shape))
    return CanonicalValue(store.node("broadcast", (n,), (own,), tensor_type((n, *x.node.shape), dtype)), view)


def expanded(store: NodeStore, x: CanonicalValue, shape: Shape) -> CanonicalValue:
    """Broadcast a value to a shape: dimensions of size one, or missing in front, are repeated."""
    x = store.rearranged(reshaped(x.shape, (1,) * (len(shape) - len(x.shape)) + x.shape), x)
    missing = tuple(d for d, n in enumerate(shape) if x.shape[d] != n)
    if not missing:
        return x
    longer = tuple(shape[d] for d in missing)
    repeated = store.make("broadcast", (prod(longer),), (x,), x.node.tensor.dtype)
    order = tuple(missing.index(d) if d in missing else len(missing) + d for d in range(len(shape)))
    order = (*order, *(len(missing) + d for d in missing))
    return store.rearranged(boxed(repeated.shape, (*longer, *x.shape), order, shape), repeated)


def _repeated(x: CanonicalValue) -> int:
    """Return how often a value repeats each element of the operand of a broadcast."""
    return x.node.shape[0] if x.node.kind == "broadcast" else 1


@constructs("add", "sub", "mul")
def _binary(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Combine two tensors of one shape elementwise, in the layout of the operand with the fewest repetitions.

    Ties are broken in favour of the first operand, or if they commute, of the node with the smaller name. If both are views of one
    node, the operand is preferred from which the other has the simpler relative view, and then the first one. Params: the operator,
    and its parameters as text.
    """
    x, y = map(canonically_viewed, operands)
    kind = params[0]
    ways = [(x, y), (y, x)]
    ways.sort(key=lambda way: (_repeated(way[0]), way[0].node.hash if kind in COMMUTATIVE else ""))
    if x.node is not y.node or kind not in COMMUTATIVE:
        ways = ways[:1]
    candidates: list[tuple[str, CanonicalValue, CanonicalValue]] = []
    for a, b in ways:
        relative = after(a.view.inverse(), b.view)
        if relative is not None:
            candidates.append((text_of(relative), a, canonically_viewed(CanonicalValue(b.node, relative))))
    if not candidates:
        pair = ways[0] if kind in COMMUTATIVE else (x, y)
        return store.unarranged(kind, params, pair, tensor_type(x.shape, dtype))
    _, a, b = min(candidates, key=lambda candidate: candidate[0])
    own = CanonicalValue(a.node, unchanged(a.node.shape))
    pair = (b, own) if kind not in COMMUTATIVE and a is y else (own, b)
    return CanonicalValue(store.node(kind, params, pair, tensor_type(a.node.shape, dtype)), a.view)


def exchanged(x: CanonicalValue) -> CanonicalValue | None:
    """Return an equal value in which the operands of a commutative node are exchanged, if one is an involution of the other.

    x + r(x) equals r(x) + x, which is r(x + r(x)) where r is its own inverse.
    """
    if x.node.kind not in COMMUTATIVE:
        return None
    first, second = x.node.operands
    view = second.view
    if first.node is not second.node or not first.view.identity or view != view.inverse():
        return None
    other = after(x.view, view)
    return CanonicalValue(x.node, other) if other is not None else None


@constructs("dot")
def _dot(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Multiply [b, m, k] by [b, k, n]. Params: the manner.

    Batch and free dimensions have the order of their operands' nodes, the contracted one that of the first operand's node.
    """
    x, y = operands
    (b, m, k), n = x.shape, y.shape[-1]
    of_x, of_y = ordering(x.view, (0, 1, 2)), ordering(y.view, (2,))
    right = after(beside((of_x[0], of_x[2], of_y[2])), y.view)
    if right is None:
        of_x |= {0: unmoved(b), 2: unmoved(k)}
        right = after(beside((unmoved(b), unmoved(k), of_y[2])), y.view)
    left = after(beside((of_x[0], of_x[1], of_x[2])), x.view)
    if left is None or right is None:
        return store.unarranged("dot", params, (x, y), tensor_type((b, m, n), dtype))
    node = store.node("dot", params, (CanonicalValue(x.node, left), CanonicalValue(y.node, right)), tensor_type((b, m, n), dtype))
    return CanonicalValue(node, beside((of_x[0], of_x[1], of_y[2])).inverse())


@constructs("concat")
def _concat(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Concatenate tensors [rest, n] along the last dimension."""
    rest = operands[0].shape[0]
    order = ordering(operands[0].view, (0,))[0]
    views = [after(beside((order, unmoved(x.shape[1]))), x.view) for x in operands]
    if None in views:
        order, views = unmoved(rest), [x.view for x in operands]
    ordered = tuple(CanonicalValue(x.node, v) for x, v in zip(operands, views, strict=True) if v is not None)
    n = sum(x.shape[1] for x in operands)
    return CanonicalValue(
        store.node("concat", params, ordered, tensor_type((rest, n), dtype)), beside((order, unmoved(n))).inverse()
    )


@constructs("slice")
def _slice(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Slice the last dimension of [rest, n]. Params: start, limit, stride."""
    (x,) = operands
    rest, n = x.shape
    size = len(range(*params))
    order = ordering(x.view, (0,))[0]
    view = after(beside((order, unmoved(n))), x.view)
    if view is None:
        order, view = unmoved(rest), x.view
    node = store.node("slice", params, (CanonicalValue(x.node, view),), tensor_type((rest, size), dtype))
    return CanonicalValue(node, beside((order, unmoved(size))).inverse())


@constructs("sum")
def _sum(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Sum [rest, n] over n, in the order of the node, since the order does not matter. Params: the manner."""
    (x,) = operands
    order = ordering(x.view, (0, 1))
    view = after(beside((order[0], order[1])), x.view)
    if view is None:
        order, view = {0: unmoved(x.shape[0])}, x.view
    node = store.node("sum", params, (CanonicalValue(x.node, view),), tensor_type((x.shape[0],), dtype))
    return CanonicalValue(node, order[0].inverse())


@constructs("rows")
def _rows(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Look up rows of a table [v, h] for indices [m]. Params: the manner."""
    table, ids = operands
    order = ordering(ids.view, (0,))[0]
    view = after(order, ids.view)
    if view is None:
        order, view = unmoved(ids.shape[0]), ids.view
    tensor = tensor_type((ids.shape[0], table.shape[1]), dtype)
    node = store.node("rows", params, (table, CanonicalValue(ids.node, view)), tensor)
    return CanonicalValue(node, beside((order, unmoved(table.shape[1]))).inverse())


@constructs("conv", "opaque")
def _opaque(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Apply an operator whose layout is fixed. Params: the kind, the shape of the result, and the parameters as text."""
    return store.unarranged(params[0], params, operands, tensor_type(params[1], dtype))
