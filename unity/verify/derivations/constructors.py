"""What an operator of some values is, as a value, by kind of node.

Rearrangements are pushed outwards: an operator works in the layout of its operands' nodes where that is the same, and its result is
seen through what is left. Nothing else is simplified, so that every operator of a program is a node, and none is made of two.
"""

from __future__ import annotations

from math import prod
from typing import Any

from unity.pcg.ir.program import tensor_type
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rearrangement import Rearrangement, after, reshaped, unchanged
from unity.verify.derivations.layouts import beside, boxed, lifted, ordering, still
from unity.verify.derivations.nodes import CanonicalValue, NodeStore, Params, constructs, settled, text_of

COMMUTATIVE = frozenset({"add", "mul"})


@constructs("laid")
def _laid(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Only where two rearrangements cannot be composed is one written down; constructed again, they may well be."""
    return operands[0]


@constructs("function")
def _function(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Of every element of one tensor. Params: its name."""
    (x,) = operands
    node = store.node("function", params, (CanonicalValue(x.node, unchanged(x.node.shape)),), tensor_type(x.node.shape, dtype))
    return CanonicalValue(node, x.view)


@constructs("broadcast")
def _broadcast(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """A tensor repeated along a new leading dimension. Params: how often."""
    (n,), (x,) = params, operands
    view: Rearrangement | None = lifted(n, x.view)
    if x.node.kind == "broadcast":  # the two leading dimensions are one
        m, *inner = x.node.shape
        view = after(view, reshaped((n * m, *inner), (n, m, *inner)))
        n, x = n * m, x.node.operands[0]
    assert view is not None
    own = CanonicalValue(x.node, unchanged(x.node.shape))
    return CanonicalValue(store.node("broadcast", (n,), (own,), tensor_type((n, *x.node.shape), dtype)), view)


def expanded(store: NodeStore, x: CanonicalValue, shape: Shape) -> CanonicalValue:
    """A value whose dimensions of size one, or missing in front, are as long as those of a shape."""
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
    """How often a value has each element of what it is a repetition of."""
    return x.node.shape[0] if x.node.kind == "broadcast" else 1


@constructs("add", "sub", "mul")
def _binary(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Element by element, of two tensors of one shape: in the layout of the one that is repeated least.

    If both are, it is the first; of two that commute, the one whose name is first. If they have one name, it is the one from which
    the other is seen more simply; if each is seen alike from the other, the first, so that the result lies as that does, wherever
    that may be. Params: which operator, and what else it says.
    """
    x, y = map(settled, operands)
    kind = params[0]
    ways = [(x, y), (y, x)]
    ways.sort(key=lambda way: (_repeated(way[0]), way[0].node.hash if kind in COMMUTATIVE else ""))
    if x.node is not y.node or kind not in COMMUTATIVE:
        ways = ways[:1]
    found: list[tuple[str, CanonicalValue, CanonicalValue]] = []
    for a, b in ways:
        relative = after(a.view.inverse(), b.view)
        if relative is not None:
            found.append((text_of(relative), a, settled(CanonicalValue(b.node, relative))))
    if not found:
        pair = ways[0] if kind in COMMUTATIVE else (x, y)
        return store.as_it_is(kind, params, pair, tensor_type(x.shape, dtype))
    _, a, b = min(found, key=lambda f: f[0])
    own = CanonicalValue(a.node, unchanged(a.node.shape))
    pair = (b, own) if kind not in COMMUTATIVE and a is y else (own, b)
    return CanonicalValue(store.node(kind, params, pair, tensor_type(a.node.shape, dtype)), a.view)


def exchanged(x: CanonicalValue) -> CanonicalValue | None:
    """The same value with the operands of what it is exchanged, if they commute and each is seen alike from the other.

    That makes x + r(x) the same as r(x) + x, which is r(x + r(x)) where r undoes itself.
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
    """[b, m, k] by [b, k, n]. Params: the manner.

    Kept and free dimensions have the order of the operands' own layouts; the contracted one that of the first's.
    """
    x, y = operands
    (b, m, k), n = x.shape, y.shape[-1]
    of_x, of_y = ordering(x.view, (0, 1, 2)), ordering(y.view, (2,))
    right = after(beside((of_x[0], of_x[2], of_y[2])), y.view)
    if right is None:
        of_x |= {0: still(b), 2: still(k)}
        right = after(beside((still(b), still(k), of_y[2])), y.view)
    left = after(beside((of_x[0], of_x[1], of_x[2])), x.view)
    if left is None or right is None:
        return store.as_it_is("dot", params, (x, y), tensor_type((b, m, n), dtype))
    node = store.node("dot", params, (CanonicalValue(x.node, left), CanonicalValue(y.node, right)), tensor_type((b, m, n), dtype))
    return CanonicalValue(node, beside((of_x[0], of_x[1], of_y[2])).inverse())


@constructs("concat")
def _concat(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """[rest, n] for several n, joined along the last dimension."""
    rest = operands[0].shape[0]
    order = ordering(operands[0].view, (0,))[0]
    turned = [after(beside((order, still(x.shape[1]))), x.view) for x in operands]
    if None in turned:
        order, turned = still(rest), [x.view for x in operands]
    given = tuple(CanonicalValue(x.node, v) for x, v in zip(operands, turned, strict=True) if v is not None)
    n = sum(x.shape[1] for x in operands)
    return CanonicalValue(store.node("concat", params, given, tensor_type((rest, n), dtype)), beside((order, still(n))).inverse())


@constructs("slice")
def _slice(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Of [rest, n]. Params: where it starts, where it ends, in which steps."""
    (x,) = operands
    rest, n = x.shape
    kept = len(range(*params))
    order = ordering(x.view, (0,))[0]
    view = after(beside((order, still(n))), x.view)
    if view is None:
        order, view = still(rest), x.view
    node = store.node("slice", params, (CanonicalValue(x.node, view),), tensor_type((rest, kept), dtype))
    return CanonicalValue(node, beside((order, still(kept))).inverse())


@constructs("sum")
def _sum(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Of [rest, n] over n, whose order does not matter. Params: the manner."""
    (x,) = operands
    order = ordering(x.view, (0, 1))
    view = after(beside((order[0], order[1])), x.view)
    if view is None:
        order, view = {0: still(x.shape[0])}, x.view
    node = store.node("sum", params, (CanonicalValue(x.node, view),), tensor_type((x.shape[0],), dtype))
    return CanonicalValue(node, order[0].inverse())


@constructs("rows")
def _rows(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Rows of a table [v, h], for indices [m]. Params: the manner."""
    table, ids = operands
    order = ordering(ids.view, (0,))[0]
    view = after(order, ids.view)
    if view is None:
        order, view = still(ids.shape[0]), ids.view
    tensor = tensor_type((ids.shape[0], table.shape[1]), dtype)
    node = store.node("rows", params, (table, CanonicalValue(ids.node, view)), tensor)
    return CanonicalValue(node, beside((order, still(table.shape[1]))).inverse())


@constructs("conv", "opaque")
def _opaque(store: NodeStore, params: Params, operands: tuple[CanonicalValue, ...], dtype: Any) -> CanonicalValue:
    """Operands as they are seen. Params: the kind, the shape, and all that there is to say."""
    return store.as_it_is(params[0], params, operands, tensor_type(params[1], dtype))
